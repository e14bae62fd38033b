"""The tokenizer and the end-of-sequence ids that belong to a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from workers.errors import ModelNotFound, ModelUnsupported


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


def generation_eos(directory: Path | str) -> tuple[int, ...]:
    """The ids that end a text, ascending: from generation_config.json, else config.json; may be empty."""
    for file in ("generation_config.json", "config.json"):
        ids = _eos_ids(_read_json(Path(directory) / file))
        if ids:
            return ids
    return ()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    if value is None:
        return ()
    return tuple(sorted(value)) if isinstance(value, list) else (value,)
