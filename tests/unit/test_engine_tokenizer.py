"""Every source that knows the end of a text is believed, and a template that knows another one is not overlooked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import CHATML, EOS_ID, byte_tokenizer
from workers.engine.tokenizer import end_ids, overlooked_end, shown
from workers.errors import ModelDamaged

END_OF_TEXT, BEGIN_OF_TURN = 256, 257


def write(directory: Path, file: str, content: Any) -> None:
    (directory / file).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ends"),
    [
        ({"eos_token_id": 256}, {"eos_token_id": 256}, "<|im_end|>", (256, 258)),  # only the tokenizer knows turns
        ({"eos_token_id": [9, 4]}, {"eos_token_id": 256}, "<|im_end|>", (4, 9, 256, 258)),
        ({}, {"text_config": {"eos_token_id": [7]}}, "<|im_end|>", (7, 258)),
        ({}, {"eos_token_id": 3, "text_config": {"eos_token_id": 7}}, None, (3, 7)),
        ({"eos_token_id": None}, {"eos_token_id": -1}, None, ()),
        ({"eos_token_id": [True, 5]}, {"eos_token_id": True, "text_config": ["no object"]}, None, (5,)),
        (None, None, "<|endoftext|>", (256,)),
    ],
)
def test_ends_of_texts_are_those_of_all_files_together(
    tmp_path: Path, generation: Any, config: Any, tokenizer: str | None, ends: tuple[int, ...]
) -> None:
    if generation is not None:
        write(tmp_path, "generation_config.json", generation)
        write(tmp_path, "config.json", config)
    read = byte_tokenizer()
    read.eos_token = tokenizer
    assert end_ids(tmp_path, read) == ends


@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelDamaged, match=r"generation_config\.json is no JSON"):
        end_ids(tmp_path, byte_tokenizer())


@pytest.mark.parametrize("template", [
    CHATML,
    # writes the end of the turn between two turns only
    "{% for m in messages %}{{ m['content'] }}{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}",
    # the next turn's beginning is the only sign of an end
    "{% for m in messages %}<|im_end|>{{ m['content'] | trim }}{% endfor %}",
])  # fmt: skip
def test_a_token_that_the_template_writes_behind_an_answer_must_be_an_end(template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    assert overlooked_end(tokenizer, (END_OF_TEXT, EOS_ID)) is None
    message = overlooked_end(tokenizer, (END_OF_TEXT,))
    assert message is not None
    assert "writes <|im_end|> (258) behind an answer, but it ends no text" in message
    assert "stop_token_ids [258]" in message
    assert "\n" not in message


@pytest.mark.parametrize("template", [
    None,
    "{{ raise_exception('no') }}",
    "{{ 'a' + 5 }}",
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    "{{ messages[0]['content'] }}<|im_end|>",  # leaves answers out
    "{% for m in messages %}{{ m['content'] | upper }}<|im_end|>{% endfor %}",
])  # fmt: skip
def test_of_a_template_that_writes_nothing_behind_an_answer_nothing_is_said(template: str | None) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    assert overlooked_end(tokenizer, (END_OF_TEXT,)) is None


def test_ends_are_shown_as_text_and_id() -> None:
    assert shown(byte_tokenizer(), (END_OF_TEXT, EOS_ID)) == "<|endoftext|> (256), <|im_end|> (258)"
    assert shown(byte_tokenizer(), ()) == "no token"
