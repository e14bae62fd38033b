"""Damage to valid inputs: of their bytes, of the values they hold, and of JSON as a text."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgpack

#: numbers at the edges of what fits somewhere
NUMBERS: tuple[int | float, ...] = (
    *(0, 1, -1, 127, 128, 255, 256, 65535, 65536, 1025, 4097),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)),
    *(0.0, -0.0, 0.5, 1.0000001, -1e-9, 5e-324, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
)
#: texts that have broken parsers
TEXTS = (
    *("", " ", "\0", "a\0b", "\n", "\ufeff", "\u202e", "\u2028", "é" * 300, "𝕏", "e\u0301", "{}", "null"),
    *("x" * 257, "x" * 513, "x" * 5000, "%s%n", "../../etc/passwd", "-1", "1e999", "user", "POST", "none", "nf4"),
)
#: keys that readers know
KEYS = ("prompt", "messages", "model", "body", "url", "custom_id", "id", "stop", "seed", "n", "job", "request", "tail")
#: pieces of JSON, and of what is nearly JSON
JSON_PIECES = (
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 5000, b"0." + b"1" * 400, b"-0", b"01", b"1."),
    *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\\x"', b'"\xff\xfe"', b'"\xc0\x80"'),
    *(b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\0", b"\t", b"\x0b", b"\xc2\xa0", b"//", b"/**/", b"'", b",,", b":", b"}{"),
    *(b'"prompt":1,', b'"prompt":"a","prompt":"b",', b'"messages":[],', b'"":0,', b'"__proto__":{},', b"\r", b"\n"),
    *(b"true", b"null", b"[[]]", b'{"a":{"a":{"a":0}}}', b'{"role":"user","content":"x"}', b"[0,1,2]"),
)
#: first bytes of msgpack's kinds of values, and one of none
MSGPACK_BYTES = bytes.fromhex("00 7f 80 90 c0 c1 c4 c7 cb cf d9 dd df ff")
#: bytes of the largest damaged value: every reader's transport has a limit of its own
MAX_GROWN_BYTES = 1 << 20
#: depths of nesting: harmless, about Python's limit, far above any limit
DEPTHS = (3, 30, 300, 900, 1100, 3000, 20_000)


def evil(rng: Random) -> Any:
    """A value that hardly any field expects."""
    match rng.randrange(9):
        case 0 | 1 | 2:
            return rng.choice(NUMBERS)
        case 3 | 4:
            return rng.choice(TEXTS)
        case 5:
            return rng.choice((None, True, False))
        case 6:
            return [rng.choice(NUMBERS) for _ in range(rng.choice((0, 1, 2, 6, 17)))]
        case 7:
            return {rng.choice(KEYS): rng.choice(TEXTS)}
        case _:
            return nested(rng.choice((3, 30, 120)))


def nested(depth: int) -> list[Any]:
    """A list in a list in a list …"""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def damage_value(rng: Random, tree: Any, extra: tuple[Any, ...] = ()) -> Any:
    """Change one place of a tree of plain values, in place where that is possible; the tree.

    `extra`: values to put there, too, which not every format can hold.
    """
    parent, tree = None, tree
    node, key = tree, None
    while isinstance(node, (list, dict)) and node and rng.random() < 0.8:
        parent, key = node, rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = parent[key]
    if parent is None:
        return evil(rng) if rng.random() < 0.05 else _grown(rng, tree)
    match rng.randrange(8):
        case 0:
            del parent[key]
        case 1:
            parent[key] = [node]
        case 2:
            parent[key] = _grown(rng, node)
        case 3 if isinstance(parent, dict):
            parent[rng.choice(KEYS)] = parent.pop(key)
        case 3:
            parent.insert(key, node)
        case 4 if isinstance(node, int | float) and not isinstance(node, bool):
            parent[key] = node + rng.choice((1, -1, 0.5, 2**31, -(2**31)))
        case _:
            parent[key] = rng.choice(extra) if extra and rng.random() < 0.2 else evil(rng)
    return tree


def _grown(rng: Random, value: Any) -> Any:
    """The same value with more in it."""
    if isinstance(value, dict):
        value[rng.choice(KEYS)] = evil(rng)
    elif isinstance(value, list):
        value.extend(value[:1] * rng.choice((1, 2, 40)) or [evil(rng)])
    elif isinstance(value, str):
        return value + rng.choice(TEXTS)
    else:
        return evil(rng)
    return value


def damage_bytes(rng: Random, data: bytes, *, front: int = 96) -> bytes:
    """Flip, cut, insert, double or overwrite; mostly within the first `front` bytes, where the structure is."""
    if not data:
        return rng.randbytes(rng.randrange(8))
    damaged = bytearray(data)
    at = rng.randrange(min(len(damaged), front)) if rng.random() < 0.8 else rng.randrange(len(damaged))
    match rng.randrange(7):
        case 0 | 1:
            damaged[at] ^= 1 << rng.randrange(8)
        case 2:
            damaged[at] = rng.choice(
                (0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC7, 0xCB, 0xCF, 0xD9, 0xDD, 0xDF, 0xFF)
            )
        case 3:
            del damaged[at:]
        case 4:
            damaged[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16)))
        case 5:
            end = at + rng.choice((1, 4, 16))
            damaged[at:at] = damaged[at:end] * rng.choice((1, 3))
        case _:
            del damaged[at : at + rng.choice((1, 2, 8))]
    return bytes(damaged)


def damage_json(rng: Random, text: bytes) -> bytes:
    """Put a piece of JSON, or of what is nearly JSON, where it does not belong; or nest the text deeply."""
    if rng.random() < 0.03:
        depth = rng.choice(DEPTHS)
        opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"messages":[', b"]}")))
        inner = rng.choice((b"0", text, b""))
        nesting = opening * depth + inner + closing * rng.choice((depth, depth, depth - 1))
        return text.replace(b":", b":" + nesting + b",", 1) if rng.random() < 0.3 else nesting
    places = [index + 1 for index, byte in enumerate(text[:400]) if byte in b'{[:,"']
    at = rng.choice(places) if places and rng.random() < 0.8 else rng.randrange(len(text) + 1)
    piece = rng.choice(JSON_PIECES)
    if rng.random() < 0.5:
        return text[:at] + piece + text[at:]
    end = next((index for index in range(at, len(text)) if text[index] in b",]}"), len(text))
    return text[:at] + piece + text[end:]


#: values only msgpack can hold
MSGPACK_ONLY: tuple[Any, ...] = (
    b"",
    b"\xff" * 20,
    msgpack.ExtType(5, b"abc"),
    msgpack.Timestamp(2**33, 5),
    {1: 2},
    {b"\xff": None},
)


def damage_packed(rng: Random, packed: bytes) -> bytes:
    """The msgpack of a damaged value, sometimes damaged again as bytes."""
    tree = msgpack.unpackb(packed, strict_map_key=False)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = damage_value(rng, tree, MSGPACK_ONLY)
    try:
        data: bytes = msgpack.packb(tree)
    except (ValueError, OverflowError):  # nested too deeply, or a number that msgpack does not know
        data = packed
    if len(data) > MAX_GROWN_BYTES:  # a part that stands in itself several times grows with every change
        data = packed
    return damage_bytes(rng, data) if rng.random() < 0.2 else data


def damage_document(rng: Random, text: bytes) -> bytes:
    """A JSON document damaged as a value, as a text or as bytes."""
    kind = rng.random()
    if kind < 0.55:
        tree = json.loads(text)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            tree = damage_value(rng, tree)
        text = json.dumps(tree, ensure_ascii=rng.random() < 0.7).encode(errors="surrogatepass")
    if kind > 0.45:
        text = damage_json(rng, text)
    return damage_bytes(rng, text) if rng.random() < 0.15 else text
