"""The tokenizer of a model directory, and the tokens that end a text of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from workers.errors import ModelDamaged, ModelNotFound, ModelUnsupported

#: a conversation whose parts are found again in what a template makes of it
_QUESTION, _ANSWER, _NEXT = "Questionword", "Answerword", "Nextword"
#: what rendering a template may raise: its own refusals, and whatever its expressions do to our messages
_TEMPLATE_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def load_tokenizer(directory: Path | str) -> PreTrainedTokenizerBase:
    """The directory's tokenizer, without running any code of the model's; ModelNotFound if there is none."""
    path = Path(directory)
    if not path.is_dir():
        raise ModelNotFound(f"model directory {path} does not exist")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except OSError as error:
        raise ModelNotFound(f"{path} has no tokenizer that can be read: {_first_line(error)}") from error
    except (ValueError, KeyError) as error:
        raise ModelUnsupported(f"the tokenizer in {path} is not supported: {_first_line(error)}") from error
    return tokenizer


def end_ids(directory: Path | str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a text, ascending; may be empty. ModelDamaged if a config is no JSON.

    Those of generation_config.json, config.json and the tokenizer together: where they disagree, each may be the only
    one that knows the end of a turn.
    """
    found = [tokenizer.eos_token_id]
    for file in ("generation_config.json", "config.json"):
        config = _read_json(Path(directory) / file)
        found.extend(_eos_ids(config))
        found.extend(_eos_ids(config.get("text_config")))
    # `true` is an int for Python
    return tuple(sorted({number for number in found if type(number) is int and number >= 0}))


def overlooked_end(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> str | None:
    """What to say if the chat template writes a token behind an answer that is none of `ends`; None if all is well."""
    token = next(_behind_the_answer(tokenizer), None)
    if token is None or token in ends:
        return None
    return (
        f"the chat template writes {shown(tokenizer, [token])} behind an answer, but it ends no text: answers may run "
        f"on; add {token} to eos_token_id in generation_config.json, or give jobs stop_token_ids [{token}]"
    )


def shown(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Tokens for people: `<|im_end|> (2)`."""
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(number)} ({number})" for number in ids) or "no token"


def _behind_the_answer(tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """The added tokens that the chat template writes between an answer and the next message's content."""
    conversation = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _NEXT},
    ]
    if not tokenizer.chat_template:
        return
    try:
        text = str(tokenizer.apply_chat_template(conversation, tokenize=False))
    except _TEMPLATE_FAILURES:
        return  # jobs will be told
    _, found, behind = text.partition(_ANSWER)
    if not found:
        return
    added = tokenizer.added_tokens_decoder
    for number in tokenizer(behind.partition(_NEXT)[0], add_special_tokens=False)["input_ids"]:
        if number in added and str(added[number]).strip():
            yield number


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelDamaged(f"{path} is no JSON: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelDamaged(f"{path} is no JSON object")
    return content


def _eos_ids(config: object) -> list[Any]:
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    return value if isinstance(value, list) else [value]
