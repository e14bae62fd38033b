"""The fewest tokens that a text can have, found without tokenising it: what cannot fit costs next to nothing."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from workers.head.spelling import BYTE_OF, from_stand_ins, steps

#: bytes of a text that are counted at a time
_COUNTED = 1 << 20
#: pre-tokenizers that keep every character, whatever else they do
_LOSSLESS = {"ByteLevel", "Digits", "Metaspace"}
#: those that keep every character unless told otherwise
_LOSSLESS_UNLESS_REMOVED = {"Split", "Punctuation"}

_Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
_FORMS: dict[str, _Form] = {"NFC": "NFC", "NFD": "NFD", "NFKC": "NFKC", "NFKD": "NFKD"}


class FewestTokens:
    """A lower bound of a text's tokens; 0 where the tokenizer, or the text, allows none. Thread-safe.

    The tokens of a text stand for pieces of it, one after the other, and together for all of it. Let a byte weigh
    1 / (bytes of the longest token that holds it). The bytes of a token weigh at most 1 then, so the bytes of a text
    weigh at most as much as it has tokens. This is "bytes / longest token", but a vocabulary with one token of 128
    spaces does not spoil it for letters.

    It holds where nothing of a text is dropped or put together: byte pair encoding of bytes, or with a token for each
    byte to fall back on, and no normalizer or pre-tokenizer but those known to keep all characters. A Unicode normal
    form keeps a text that has that form already. Bytes that the vocabulary lacks weigh nothing, nor does white space
    where an added token swallows what stands beside it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        normalizing, splitting = steps(tokenizer.normalizer), steps(tokenizer.pre_tokenizer)
        self._forms = tuple(_FORMS[step["type"]] for step in normalizing if step["type"] in _FORMS)
        self._marks = tuple({*_marks(normalizing), *_marks(splitting)})
        in_bytes = any(step["type"] == "ByteLevel" for step in (*normalizing, *splitting))
        is_lossless = all(map(_keeps_all, normalizing)) and all(map(_keeps_all, splitting))
        unknown = _unknown_bytes(tokenizer, in_bytes) if is_lossless and not (in_bytes and self._marks) else None
        self._weights = None if unknown is None else self._weighed(tokenizer, in_bytes, unknown)

    def __call__(self, text: str) -> int:
        """Tokens that `text` has at least, those that a template or a beginning of sequence adds left out."""
        if self._weights is None or not all(unicodedata.is_normalized(form, text) for form in self._forms):
            return 0
        data = np.frombuffer(self._plain(text), np.uint8)
        pieces = (data[start : start + _COUNTED] for start in range(0, len(data), _COUNTED))
        return int(sum(float(np.bincount(piece, minlength=256) @ self._weights) for piece in pieces))

    def _plain(self, text: str) -> bytes:
        """The bytes to weigh: a space and the mark that a vocabulary writes for it are the same."""
        for mark in self._marks:
            text = text.replace(mark, " ")
        return text.encode()

    def _weighed(self, tokenizer: Tokenizer, in_bytes: bool, weightless: set[int]) -> NDArray[np.float64]:
        added = tokenizer.get_added_tokens_decoder()
        longest = np.ones(256)
        for entry, token in tokenizer.get_vocab(with_added_tokens=True).items():
            if token not in added:
                _lengthen(longest, from_stand_ins(entry) if in_bytes else self._plain(entry))
        for each in added.values():
            _lengthen(longest, self._plain(each.content))
            if tokenizer.normalizer is not None:  # such a token may be looked for behind the normalizer
                _lengthen(longest, self._plain(tokenizer.normalizer.normalize_str(each.content)))
        weights = 1.0 / longest
        if any(each.lstrip or each.rstrip for each in added.values()):
            weightless = weightless | _white_space()
        weights[list(weightless)] = 0.0
        return weights


def _lengthen(longest: NDArray[np.float64], data: bytes) -> None:
    if data:
        places = np.frombuffer(data, np.uint8)
        longest[places] = np.maximum(longest[places], len(data))


def _keeps_all(step: dict[str, Any]) -> bool:
    kind = step["type"]
    if kind in _LOSSLESS_UNLESS_REMOVED:
        return bool(step["behavior"] != "Removed")
    if kind == "Replace":
        return step["pattern"].get("String") == " " and len(step["content"]) == 1
    return kind in _LOSSLESS or kind in _FORMS or kind == "Prepend"


def _marks(parts: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What is written for a space."""
    for step in parts:
        if step["type"] == "Replace":
            yield step["content"]
        elif step["type"] == "Metaspace":
            yield step["replacement"]


def _white_space() -> set[int]:
    """Every byte of a white space character, and so some of other characters, too."""
    return {byte for number in range(0x3001) if chr(number).isspace() for byte in chr(number).encode()}


def _unknown_bytes(tokenizer: Tokenizer, in_bytes: bool) -> set[int] | None:
    """Bytes that may vanish, or be many in one unknown token; None where anything may."""
    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if in_bytes:
        return {byte for entry, byte in BYTE_OF.items() if tokenizer.token_to_id(entry) is None}
    has_all = model.byte_fallback and all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return set() if has_all else None
