"""The bytes of every token by itself, as far as it has any: a token may hold a part of a character."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer

#: a token that stands for one byte, where the vocabulary lacks a character (sentencepiece's byte fallback)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelled(NamedTuple):
    """A token as a reader sees it."""

    #: what its bytes decode to; U+FFFD for what is no whole character
    text: str
    bytes: tuple[int, ...]


class Spelling:
    """Spells the tokens of one tokenizer. Thread-safe.

    The bytes of a text's tokens, one after the other, are those of the text, special tokens and the space that some
    decoders strip from its beginning apart. Which rule turns an entry of the vocabulary into bytes follows from the
    tokenizer's decoder: GPT-2's printable stand-ins for bytes (byte-level BPE), or "▁" for a space and `<0xE4>` for
    a byte (sentencepiece). Added tokens, special ones too, are spelled as they are written.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._bytes_of = _rule(tokenizer.decoder)
        self._spelled: dict[int, Spelled] = {}

    def __call__(self, token: int) -> Spelled:
        """A token's text and bytes; empty for an id that the vocabulary has no entry for."""
        spelled = self._spelled.get(token)
        if spelled is None:
            data = self._read(token)
            spelled = self._spelled[token] = Spelled(data.decode(errors="replace"), tuple(data))
        return spelled

    def _read(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        entry = self._tokenizer.id_to_token(token)
        return b"" if entry is None else self._bytes_of(entry)


def _rule(decoder: Any) -> Callable[[str], bytes]:
    """How an entry of the vocabulary becomes bytes."""
    decoding = steps(decoder)
    if any(step["type"] == "ByteLevel" for step in decoding):
        return from_stand_ins
    replaced = [replaced for step in decoding for replaced in _replaced(step)]
    has_byte_tokens = any(step["type"] == "ByteFallback" for step in decoding)

    def read(entry: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(entry) if has_byte_tokens else None
        if byte is not None:
            return bytes((int(byte[1], 16),))
        for mark, text in replaced:
            entry = entry.replace(mark, text)
        return entry.encode()

    return read


def steps(part: Any) -> list[dict[str, Any]]:
    """What a tokenizer's normalizer, pre-tokenizer or decoder does, in order: the settings of each; none for None."""
    return [] if part is None else list(_flat(json.loads(part.__getstate__())))


def _flat(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if settings["type"] != "Sequence":
        yield settings
        return
    (parts,) = (value for name, value in settings.items() if name != "type")
    for part in parts:
        yield from _flat(part)


def _replaced(step: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a step of a decoder writes for what, within a token."""
    if step["type"] == "Metaspace":
        yield step["replacement"], " "
    elif step["type"] == "Replace" and "String" in step["pattern"]:
        yield step["pattern"]["String"], step["content"]


def from_stand_ins(entry: str) -> bytes:
    """Byte-level BPE; what has no stand-in is taken as it is, as its decoder does."""
    try:
        return bytes(BYTE_OF[character] for character in entry)
    except KeyError:
        return entry.encode()


def _stand_ins() -> dict[str, int]:
    """GPT-2's printable character for every byte: itself where it is printable, else the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


#: the byte that each stand-in stands for
BYTE_OF = _stand_ins()
