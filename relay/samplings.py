"""How a sampling is laid out in a header: what most samplings do not use takes one byte."""

from __future__ import annotations

from typing import Any

from relay.errors import FrameInvalid
from relay.fields import INT63, MAX_ALTERNATIVES, MAX_BARRED, MAX_BIASES, Fields
from relay.messages import Sampling

_ANY = float("inf")


def write_sampling(s: Sampling) -> list[Any]:
    """The fields of a sampling, its processors as one array, or none."""
    processors = _write_processors(s) if s.has_processors or s.free_from else None
    return [float(s.temperature), s.top_k, float(s.top_p), float(s.min_p), s.seed, s.logprobs, processors]


def read_sampling(value: object) -> Sampling:
    """What `write_sampling` wrote. Raises `FrameInvalid`."""
    f = Fields(value, "Sampling", 7)
    return Sampling(
        temperature=f.number("temperature"),
        top_k=f.integer("top_k"),
        top_p=f.number("top_p", 1.0),
        min_p=f.number("min_p", 1.0),
        seed=f.integer("seed", -INT63 - 1, INT63),
        logprobs=_read_logprobs(f.item()),
        **_read_processors(f.item()),
    )


def _write_processors(s: Sampling) -> list[Any]:
    return [
        *(float(s.repetition_penalty), float(s.presence_penalty), float(s.frequency_penalty)),
        [token for token, _ in s.logit_bias],
        [float(bias) for _, bias in s.logit_bias],
        list(s.barred),
        s.free_from,
    ]


def _read_processors(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    f = Fields(value, "Processors", 7)
    return {
        "repetition_penalty": f.number("repetition_penalty"),
        "presence_penalty": f.number("presence_penalty", low=-_ANY),
        "frequency_penalty": f.number("frequency_penalty", low=-_ANY),
        "logit_bias": _paired(f.tokens("biased", MAX_BIASES), f.numbers("biases", MAX_BIASES)),
        "barred": f.tokens("barred", MAX_BARRED),
        "free_from": f.integer("free_from"),
    }


def _paired(tokens: tuple[int, ...], biases: tuple[float, ...]) -> tuple[tuple[int, float], ...]:
    if len(tokens) != len(biases):
        raise FrameInvalid(f"Processors.biases: {len(biases)} for {len(tokens)} tokens")
    return tuple(zip(tokens, biases, strict=True))


def _read_logprobs(value: object) -> int | None:
    return None if value is None else Fields([value], "Sampling", 1).integer("logprobs", 0, MAX_ALTERNATIVES)
