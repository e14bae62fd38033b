"""Messages whose texts stay texts: what reads like a control token in them becomes ordinary tokens."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer
from tokenizers.normalizers import Replace, Sequence

#: noncharacters, which no text may hold between programs
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class PlainContents:
    """Marks control tokens in messages for a chat template, and encodes what the template made of them. Thread-safe.

    Control tokens are the special ones and those added ones that the template itself writes, as in `transformers`.
    Marks stand around them, so that a template may still look for them and split at them. A second tokenizer drops the
    marks, but only behind its search for added tokens: so a text has the tokens of ordinary text throughout.

    Args:
        tokenizer: the model's (`backend_tokenizer` of a transformers tokenizer).
        template: its chat template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._original = tokenizer
        self._control = {
            each.content
            for each in tokenizer.get_added_tokens_decoder().values()
            if each.special or (each.content in template and not each.content.isspace())
        }
        any_control = "|".join(map(re.escape, sorted(self._control, key=len, reverse=True))) or "(?!)"
        self._written = re.compile(any_control)
        self._marked = re.compile(f"{_OPEN}({any_control}){_CLOSE}")
        self._lock = threading.Lock()
        self._forgetful: Tokenizer | None = None

    def mark(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with marks around control tokens in its texts."""
        return {name: text if name == "role" else self._mark(text) for name, text in message.items()}

    def without_marks(self, rendered: str) -> str:
        """The text without the marks."""
        return rendered.replace(_OPEN, "").replace(_CLOSE, "")

    def tokens(self, rendered: str) -> list[int]:
        """The tokens of marked messages that went through the template."""
        # between any two characters: then nothing within a control token is one either
        broken = self._marked.sub(lambda found: _OPEN.join(found[1]), rendered)
        (encoding,) = self._tokenizer().encode_batch_fast([broken], add_special_tokens=False)
        return list(encoding.ids)

    def _mark(self, text: str) -> str:
        return self._written.sub(f"{_OPEN}\\g<0>{_CLOSE}", self.without_marks(text))

    def _tokenizer(self) -> Tokenizer:
        """Made when it is first needed: it takes as much memory as the original."""
        with self._lock:
            if self._forgetful is None:
                self._forgetful = _forgetful(self._original, self._control)
            return self._forgetful


def _forgetful(original: Tokenizer, control: Collection[str]) -> Tokenizer:
    """The same tokenizer, but it drops the marks where it normalises, and looks for control tokens before that only."""
    settings = json.loads(original.to_str())
    for each in settings["added_tokens"]:
        each["normalized"] = each["normalized"] and each["content"] not in control
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    normalizer = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = Sequence([Replace(_OPEN, ""), Replace(_CLOSE, ""), *normalizer])
    tokenizer.encode_special_tokens = original.encode_special_tokens
    return tokenizer
