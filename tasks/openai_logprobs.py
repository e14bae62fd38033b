"""Log probabilities in the two shapes that OpenAI's answers have."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from tasks.logprobs import Alternative, TokenLogprob

#: OpenAI's stand-in for a log probability of minus infinity, which JSON does not have
LEAST = -9999.0
#: what a decoder writes for bytes that are no character by themselves
_REPLACEMENT = "\ufffd"


def chat_logprobs(positions: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[i].logprobs` of a chat."""
    content = [
        {**_alternative(position.chosen), "top_logprobs": [_alternative(item) for item in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(positions: Sequence[TokenLogprob], text: str) -> dict[str, Any]:
    """`choices[i].logprobs` of a completion with this text.

    `top_logprobs` has the chosen token among the likeliest, so up to one more than were asked for; where two tokens
    read the same, the likelier one stands there.
    """
    return {
        "tokens": [_shown(position.chosen) for position in positions],
        "token_logprobs": [_finite(position.chosen.logprob) for position in positions],
        "top_logprobs": [_by_text(position) for position in positions],
        "text_offset": _offsets(positions, text),
    }


def _alternative(item: Alternative) -> dict[str, Any]:
    return {"token": item.text, "logprob": _finite(item.logprob), "bytes": list(item.bytes)}


def _by_text(position: TokenLogprob) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in (*position.top, position.chosen):
        found.setdefault(_shown(item), _finite(item.logprob))
    return found


def _shown(item: Alternative) -> str:
    """A token's text, or its bytes as OpenAI writes them where they are no text by themselves."""
    if _REPLACEMENT not in item.text:
        return item.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in item.bytes)


def _offsets(positions: Sequence[TokenLogprob], text: str) -> list[int]:
    """Where each token begins in the text; at its end for tokens that the text is cut before."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, length = [], 0
    for position in positions:
        offsets.append(min(length, len(text)))
        length += len(decoder.decode(bytes(position.chosen.bytes)))
    return offsets


def _finite(logprob: float) -> float:
    return logprob if logprob >= LEAST else LEAST  # what is no number, too
