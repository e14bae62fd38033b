"""The parameters of a request: what each may be, and what is said when it is not.

Three kinds of names: those that work, those of OpenAI's and vLLM's that do not work here and are accepted
only at the value that asks for nothing (`n: 1`, penalties 0, …), and unknown ones. `null` means "not given".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from tasks.errors import ParameterInvalid

#: most tokens a request may ask for; the served context is smaller, but known only at run time
MAX_TOKENS = 1_000_000
#: most stop strings of a request, and characters in one
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1_000
#: largest token id or `top_k`
_MAX_INT32 = 2**31 - 1

Rule = Callable[[object], Any]


class Unexpected(ValueError):
    """A value breaks its rule; the text says what was expected."""


def describe(value: object) -> str:
    """A JSON value for a message: short, one line, printable."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    text = json.dumps(value[:41] if isinstance(value, str) else value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def printable(name: str) -> str:
    """A parameter's or key's name for a message."""
    shown = name if name.isprintable() else json.dumps(name)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"


def read_parameters(values: Mapping[str, object]) -> dict[str, Any]:
    """The checked fields of a `GenerationRequest` that `values` sets. Raises ParameterInvalid."""
    read: dict[str, Any] = {}
    for name, value in values.items():
        if value is None and (name in _RULES or name in _NEUTRAL):
            continue
        if name in _RULES:
            read[name] = check(name, _RULES[name], value)
        elif name in _NEUTRAL:
            check(name, _NEUTRAL[name], value)
        else:
            raise ParameterInvalid(printable(name), _unknown(name))
    return _one_limit(read)


def check(name: str, rule: Rule, value: object) -> Any:
    """`value` as `rule` returns it. Raises ParameterInvalid if it breaks the rule."""
    try:
        return rule(value)
    except Unexpected as error:
        raise ParameterInvalid(name, f"expected {error}, got {describe(value)}") from error


def is_parameter(name: str) -> bool:
    """Whether `name` belongs in a request's body."""
    return name in _RULES or name in _NEUTRAL or name in BODY_FIELDS


def _one_limit(read: dict[str, Any]) -> dict[str, Any]:
    """Join OpenAI's two names of one limit."""
    newer = read.pop("max_completion_tokens", None)
    if newer is not None and read.setdefault("max_tokens", newer) != newer:
        raise ParameterInvalid("max_completion_tokens", "expected the same value as max_tokens, or one of them")
    return read


def _unknown(name: str) -> str:
    known = [*BODY_FIELDS, *LINE_FIELDS, *_RULES, *_NEUTRAL]
    similar = get_close_matches(name[:60], known, n=1, cutoff=0.75)
    return f"unknown parameter; did you mean {similar[0]}?" if similar else "unknown parameter"


def _integer(low: int, high: int) -> Rule:
    def rule(value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise Unexpected(f"an integer from {low} to {high}")

    return rule


def _number(low: float, high: float, *, above: bool = False) -> Rule:
    """A number in [low, high], or in (low, high] if `above`."""
    span = f"a number above {low:g}, at most {high:g}" if above else f"a number from {low:g} to {high:g}"

    def rule(value: object) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and low <= value <= high and not (above and value == low):  # type: ignore[operator]
            return float(value)  # type: ignore[arg-type]
        raise Unexpected(span)

    return rule


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise Unexpected("true or false")


def _top_k(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= _MAX_INT32:
        return max(value, 0)
    raise Unexpected(f"an integer from 1 to {_MAX_INT32}, or 0 or -1 for off")


def _stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) <= MAX_STOPS and all(_is_stop(item) for item in stops):
        return tuple(stops)
    raise Unexpected(f"a text or up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARACTERS} characters")


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_STOP_CHARACTERS


def _only(*allowed: object) -> Rule:
    """One of a few values that ask for nothing; 1 and 1.0 are the same, 1 and true are not."""
    shown = " or ".join(json.dumps(item) for item in allowed)

    def rule(value: object) -> None:
        same = [item for item in allowed if item == value and isinstance(item, bool) == isinstance(value, bool)]
        if not same:
            raise Unexpected(f"{shown}: anything else is not supported")

    return rule


def _any(kind: type, shown: str) -> Rule:
    """Any value of a type: a note for the service that has no effect on the text."""

    def rule(value: object) -> None:
        if not isinstance(value, kind):
            raise Unexpected(shown)

    return rule


#: fields of a body that are no parameters
BODY_FIELDS = ("model", "prompt", "messages")
#: fields of a line, in the short form beside the parameters
LINE_FIELDS = ("custom_id", "expires_in")

_RULES: Mapping[str, Rule] = {
    "max_tokens": _integer(1, MAX_TOKENS),
    "max_completion_tokens": _integer(1, MAX_TOKENS),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, above=True),
    "top_k": _top_k,
    "min_p": _number(0, 1),
    "seed": _integer(-(2**63), 2**63 - 1),
    "stop": _stop,
    "ignore_eos": _boolean,
}

_NOT_GIVEN = _only(None)

_NEUTRAL: Mapping[str, Rule] = {
    # of both endpoints
    "n": _only(1),
    "stream": _only(False),
    "stream_options": _NOT_GIVEN,
    "presence_penalty": _only(0),
    "frequency_penalty": _only(0),
    "logit_bias": _only({}),
    "user": _any(str, "a text"),
    # of chat completions
    "logprobs": _only(False),
    "top_logprobs": _only(0),
    "tools": _only([]),
    "tool_choice": _only("none", "auto"),
    "parallel_tool_calls": _any(bool, "true or false"),
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "response_format": _only({"type": "text"}),
    "modalities": _only(["text"]),
    "audio": _NOT_GIVEN,
    "prediction": _NOT_GIVEN,
    "reasoning_effort": _NOT_GIVEN,
    "verbosity": _NOT_GIVEN,
    "web_search_options": _NOT_GIVEN,
    "service_tier": _only("auto", "default"),
    "metadata": _any(dict, "an object"),
    "store": _any(bool, "true or false"),
    "safety_identifier": _any(str, "a text"),
    "prompt_cache_key": _any(str, "a text"),
    "prompt_cache_retention": _any(str, "a text"),
    # of completions
    "best_of": _only(1),
    "echo": _only(False),
    "suffix": _only(""),
    # of vLLM
    "repetition_penalty": _only(1),
    "length_penalty": _only(1),
    "min_tokens": _only(0),
    "stop_token_ids": _only([]),
    "bad_words": _only([]),
    "use_beam_search": _only(False),
    "skip_special_tokens": _only(True),
    "spaces_between_special_tokens": _only(True),
    "include_stop_str_in_output": _only(False),
    "prompt_logprobs": _NOT_GIVEN,
    "truncate_prompt_tokens": _NOT_GIVEN,
    "add_generation_prompt": _only(True),
    "continue_final_message": _only(False),
    "chat_template": _NOT_GIVEN,
    "chat_template_kwargs": _only({}),
    "guided_json": _NOT_GIVEN,
    "guided_regex": _NOT_GIVEN,
    "guided_choice": _NOT_GIVEN,
    "guided_grammar": _NOT_GIVEN,
    "structured_outputs": _NOT_GIVEN,
    "priority": _only(0),
}
