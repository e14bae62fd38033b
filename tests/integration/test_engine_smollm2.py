"""The real small model: converted right, cut in the middle, the same text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models import smollm2_directory
from workers.engine.loader import load_head, load_tail
from workers.engine.source import resolve
from workers.engine.tokenizer import end_ids, load_tokenizer

NEW_TOKENS = 24
PROMPTS = ("What is the capital of France?", "Write one sentence about the sea.", "Count from 1 to 9.")


@pytest.fixture(scope="module")
def directory() -> Path:
    return smollm2_directory()


def test_it_is_cut_in_the_middle_of_its_thirty_layers(directory: Path) -> None:
    found = resolve(str(directory))
    assert (found.num_layers, found.split, found.context) == (30, 15, 8192)


def test_its_tokenizer_ends_texts_at_im_end_and_adds_no_bos(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == 2
    assert end_ids(directory, tokenizer) == (2,)
    assert tokenizer.convert_ids_to_tokens(tokenizer("Hi there")["input_ids"]) == ["Hi", "Ġthere"]
    assert len(tokenizer) == 49152


def test_its_tokenizer_splits_digits_one_by_one(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    assert tokenizer.convert_ids_to_tokens(tokenizer("In 2024,")["input_ids"]) == ["In", "Ġ", "2", "0", "2", "4", ","]


def test_its_tokenizer_reads_back_any_text(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    for text in ("naïve 😀 don't\n\n\tx  y", "  leading", "日本語 1.5e-3", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_its_chat_template_adds_the_models_own_system_prompt(directory: Path) -> None:
    text = load_tokenizer(directory).apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_cut_in_the_middle_it_writes_what_the_uncut_model_writes(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in PROMPTS
    ]
    head = load_head(directory, 15, slots=4, max_length=128, max_query=32)
    tail = load_tail(directory, 15, slots=4, max_length=128, max_query=32)
    texts = [list(prompt) for prompt in prompts]
    slots = torch.tensor([3, 0, 2])
    for row, prompt in enumerate(prompts):
        for begin in range(0, len(prompt), 32):
            where = (slots[row : row + 1], torch.tensor([begin]))
            normed = tail.forward(head.forward(torch.tensor([prompt[begin : begin + 32]]), *where), *where)
        texts[row].append(int(tail.logits(normed[:, -1]).argmax()))
    for _ in range(NEW_TOKENS - 1):
        where = (slots, torch.tensor([len(text) - 1 for text in texts]))
        normed = tail.forward(head.forward(torch.tensor([text[-1:] for text in texts]), *where), *where)
        for text, token in zip(texts, tail.logits(normed[:, -1]).argmax(-1).tolist(), strict=True):
            text.append(token)
    uncut = AutoModelForCausalLM.from_pretrained(directory)
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = torch.tensor([prompt])
        theirs = uncut.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW_TOKENS
        )[0].tolist()
        assert text[: len(theirs)] == theirs  # the library stops at the end of the text, this loop does not
