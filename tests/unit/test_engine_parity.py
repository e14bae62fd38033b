"""Every family of the allow-list, cut anywhere, against the uncut model of the library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models import tiny_model
from workers.engine.families import FAMILIES
from workers.engine.loader import load_head, load_tail, load_whole
from workers.engine.shard import HeadShard, TailShard

LAYERS = 4
#: shorter than every prompt with its completion
WINDOW = 6
NEW_TOKENS = 16
#: rows of different lengths: the shortest fits one chunk, the others need several
PROMPTS = ([72, 101], list(b"A prompt with some length"), list(b"twelve bytes"))
#: neither consecutive nor ascending
SLOTS = (4, 0, 2)
#: what float32 matmuls of different shapes may differ by, in logits of size ~10
TOLERANCE = 1e-3
WITHOUT_WINDOW = ("llama", "granite", "cohere")
CASES = [
    (family, tied, window)
    for family in FAMILIES
    for tied in (False, True)
    for window in ((None,) if family in WITHOUT_WINDOW else (None, WINDOW))
]


@dataclass
class Case:
    """A tiny model on disk and in memory."""

    directory: Path
    uncut: PreTrainedModel
    window: int | None


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'tied' if case[1] else 'untied'}-{case[2]}")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, tied, window = request.param
    directory = tiny_model(
        tmp_path_factory.mktemp(family), family, layers=LAYERS, tied=tied, window=window, seed=len(family)
    )
    # transformers before 5.24 runs Gemma 2 with sdpa by default, which leaves its score cap out
    attention = "eager" if family == "gemma2" else "sdpa"
    uncut = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=attention)
    return Case(directory, uncut.eval(), window)


def capacity() -> dict[str, int]:
    return {"slots": 5, "max_length": 64, "max_query": 8}


def generate_through_halves(head: HeadShard, tail: TailShard) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy texts of PROMPTS, and the logits that each new token was chosen from.

    Prefills in ragged chunks with padding, then decodes all rows in one forward of three tokens each: the newest
    and two wrong drafts, which the next round rewinds over. A padding row on the scratch slot runs along.
    """
    slots = torch.tensor([*SLOTS, head.scratch_slot])
    texts = [list(prompt) for prompt in PROMPTS]
    logits: list[list[Tensor]] = [[] for _ in texts]
    for begin in range(0, max(map(len, texts)), 7):
        chunks = [prompt[begin : begin + 7] for prompt in PROMPTS]
        live = [row for row, chunk in enumerate(chunks) if chunk]
        tokens = torch.tensor([chunks[row] + [9] * (7 - len(chunks[row])) for row in live])
        out = forward(head, tail, tokens, slots[live], torch.full((len(live),), begin))
        for index, row in enumerate(live):
            if begin + len(chunks[row]) == len(PROMPTS[row]):
                logits[row].append(out[index, len(chunks[row]) - 1])
    for _ in range(NEW_TOKENS):
        for text, steps in zip(texts, logits, strict=True):
            text.append(int(steps[-1].argmax()))
        tokens = torch.tensor([[text[-1], 33, 44] for text in texts] + [[1, 2, 3]])
        starts = torch.tensor([len(text) - 1 for text in texts] + [0])
        out = forward(head, tail, tokens, slots, starts)
        for row, steps in enumerate(logits):
            steps.append(out[row, 0])
    return texts, [torch.stack(steps[:NEW_TOKENS]) for steps in logits]


def forward(head: HeadShard, tail: TailShard, tokens: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
    """Logits [rows, query, vocab] of both halves in a row."""
    hidden = tail.forward(head.forward(tokens, slots, starts), slots, starts)
    rows, query, size = hidden.shape
    return tail.logits(hidden.view(rows * query, size)).view(rows, query, -1)


@pytest.mark.parametrize("split", [1, LAYERS // 2, LAYERS - 1])
def test_a_model_cut_anywhere_gives_the_uncut_models_logits_and_text(case: Case, split: int) -> None:
    head = load_head(case.directory, split, **capacity())
    tail = load_tail(case.directory, split, **capacity())
    texts, logits = generate_through_halves(head, tail)
    for prompt, text, mine in zip(PROMPTS, texts, logits, strict=True):
        theirs = uncut_logits(case.uncut, text)[len(prompt) - 1 : -1]
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
        assert text[len(prompt) :] == theirs.argmax(-1).tolist()
    new = {token for prompt, text in zip(PROMPTS, texts, strict=True) for token in text[len(prompt) :]}
    assert len(new) > 5, "texts this uniform prove nothing"


def test_the_hidden_states_at_the_cut_are_the_uncut_models(case: Case) -> None:
    tokens = torch.tensor([PROMPTS[1]])
    head = load_head(case.directory, 2, slots=5, max_length=64, max_query=32)
    with torch.inference_mode():
        theirs = case.uncut(tokens, output_hidden_states=True).hidden_states[2]
    mine = head.forward(tokens, torch.tensor([3]), torch.tensor([0]))
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


def test_the_whole_model_continues_as_the_librarys_generate_does(case: Case) -> None:
    whole = load_whole(case.directory, **capacity())
    prompt = PROMPTS[2]
    text = list(prompt)
    for begin in range(0, len(prompt), 6):
        hidden = whole.forward(torch.tensor([prompt[begin : begin + 6]]), torch.tensor([1]), torch.tensor([begin]))
    for _ in range(NEW_TOKENS):
        text.append(int(whole.logits(hidden[:, -1]).argmax()))
        hidden = whole.forward(torch.tensor([text[-1:]]), torch.tensor([1]), torch.tensor([len(text) - 1]))
    tokens = torch.tensor([prompt])
    theirs = case.uncut.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW_TOKENS
    )
    length = theirs.shape[1]  # shorter if it ended
    assert text[:length] == theirs[0].tolist()


def test_eager_and_sdpa_attention_agree(case: Case) -> None:
    if case.uncut.config.model_type == "gemma2":
        pytest.skip("caps attention scores, which only eager attention does")
    tokens = torch.tensor([PROMPTS[1][:8], PROMPTS[1][8:16]])
    slots, starts = torch.tensor([1, 3]), torch.tensor([0, 0])
    sdpa, eager = (load_whole(case.directory, **capacity(), attention=kind) for kind in ("sdpa", "eager"))
    torch.testing.assert_close(
        sdpa.forward(tokens, slots, starts), eager.forward(tokens, slots, starts), atol=1e-4, rtol=0
    )


def test_a_window_shorter_than_the_text_changes_the_logits(case: Case) -> None:
    if case.window is None:
        pytest.skip("has no window")
    tokens = PROMPTS[1]
    windowed = uncut_logits(case.uncut, tokens)
    case.uncut.config.sliding_window, kept = 4096, case.uncut.config.sliding_window
    unlimited = uncut_logits(case.uncut, tokens)
    case.uncut.config.sliding_window = kept
    assert (windowed[-1] - unlimited[-1]).abs().max() > 0.1


def uncut_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The library's logits [tokens, vocab] of a text fed whole."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()
