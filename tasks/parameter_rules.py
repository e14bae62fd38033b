"""What a single value may be. A rule returns the checked value or raises Unexpected, which says what it expected."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeGuard

from tasks.errors import ParameterInvalid
from tasks.generation import TokenBias

#: most stop strings of a request, and characters in one
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1_000
#: most entries of `logit_bias`, and of `stop_token_ids`
MAX_TOKEN_IDS = 1_024
#: largest bias of a token, in either direction
MAX_BIAS = 100
#: levels of objects and lists in a note: writing JSON takes a frame of Python's stack for each
MAX_LEVELS = 100
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


def check(name: str, rule: Rule, value: object) -> Any:
    """`value` as `rule` returns it. Raises ParameterInvalid if it breaks the rule."""
    try:
        return rule(value)
    except Unexpected as error:
        raise ParameterInvalid(name, f"expected {error}, got {describe(value)}") from error


def integer(low: int, high: int) -> Rule:
    """An integer in [low, high]."""

    def rule(value: object) -> int:
        number = _whole(value)
        if _is_integer(number) and low <= number <= high:
            return number
        raise Unexpected(f"an integer from {low} to {high}")

    return rule


def number(low: float, high: float, *, above: bool = False) -> Rule:
    """A number in [low, high], or in (low, high] if `above`."""
    span = f"a number above {low:g}, at most {high:g}" if above else f"a number from {low:g} to {high:g}"

    def rule(value: object) -> float:
        if _is_number(value) and low <= value <= high and not (above and value == low):
            return float(value)
        raise Unexpected(span)

    return rule


def boolean(value: object) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    raise Unexpected("true or false")


def switch_or_count(high: int) -> Rule:
    """True, false, or an integer in [0, high]: which of them it may be depends on the endpoint."""

    def rule(value: object) -> bool | int:
        number = _whole(value)
        if isinstance(number, bool) or (_is_integer(number) and 0 <= number <= high):
            return number
        raise Unexpected(f"true or false, or for a completion an integer from 0 to {high}")

    return rule


def top_k(value: object) -> int:
    """A number of tokens; 0 and -1 are off."""
    number = _whole(value)
    if _is_integer(number) and -1 <= number <= _MAX_INT32:
        return max(number, 0)
    raise Unexpected(f"an integer from 1 to {_MAX_INT32}, or 0 or -1 for off")


def stops(value: object) -> tuple[str, ...]:
    """Stop strings: one, or a list of them."""
    found = [value] if isinstance(value, str) else value
    if isinstance(found, list) and len(found) <= MAX_STOPS and all(_is_stop(item) for item in found):
        return tuple(found)
    raise Unexpected(f"a text or up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARACTERS} characters")


def token_ids(value: object) -> tuple[int, ...]:
    """A list of token ids, without repetitions, in ascending order: their order means nothing."""
    if isinstance(value, list) and len(value) <= MAX_TOKEN_IDS and all(is_token_id(item) for item in value):
        return tuple(sorted({int(item) for item in value}))
    raise Unexpected(f"up to {MAX_TOKEN_IDS} token ids in a list")


def token_biases(value: object) -> tuple[TokenBias, ...]:
    """OpenAI's object of biases by token id, in ascending order of the ids; a bias of 0 asks for nothing.

    Raises ParameterInvalid itself where it can name the key.
    """
    if not isinstance(value, dict) or len(value) > MAX_TOKEN_IDS:
        raise Unexpected(f'an object like {{"1234": -5}} of up to {MAX_TOKEN_IDS} token ids')
    biases = [TokenBias(_token_of(key), _bias(key, item)) for key, item in value.items()]
    return tuple(sorted((item for item in biases if item.bias), key=lambda item: item.token))


def notes(value: object) -> None:
    """An object that can be written as it was read: a number beyond all floats would come back as no JSON."""
    if not isinstance(value, dict):
        raise Unexpected("an object")
    if _is_deeper(value, MAX_LEVELS):
        raise Unexpected(f"an object of at most {MAX_LEVELS} levels")
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise Unexpected("an object with numbers up to 1.8e308") from error


def _is_deeper(value: object, levels: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(not levels or _is_deeper(item, levels - 1) for item in items)


def only(*allowed: object) -> Rule:
    """One of a few values that ask for nothing; 1 and 1.0 are the same, 1 and true are not."""
    shown = " or ".join(json.dumps(item) for item in allowed)

    def rule(value: object) -> None:
        same = [item for item in allowed if item == value and isinstance(item, bool) == isinstance(value, bool)]
        if not same:
            raise Unexpected(f"{shown}: anything else is not supported")

    return rule


def anything(kind: type, shown: str) -> Rule:
    """Any value of a type: a note for the service that has no effect on the text."""

    def rule(value: object) -> None:
        if not isinstance(value, kind):
            raise Unexpected(shown)

    return rule


def is_text(value: object) -> TypeGuard[str]:
    """Whether this is a text that has UTF-8: without halves of surrogate pairs."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_token_id(value: object) -> bool:
    """Whether this can be a token's id, in whatever vocabulary; `int` of it is the id."""
    number = _whole(value)
    return _is_integer(number) and 0 <= number <= _MAX_INT32


def _token_of(key: str) -> int:
    # one spelling for each id: "07" beside "7" would be two biases of one token
    if key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key and is_token_id(int(key)):
        return int(key)
    raise ParameterInvalid(f"logit_bias.{printable(key)}", f"expected a token id as key, got {describe(key)}")


def _bias(key: str, value: object) -> float:
    return float(check(f"logit_bias.{key}", number(-MAX_BIAS, MAX_BIAS), value))


def _whole(value: object) -> object:
    """A whole number written with a point becomes an integer, as 42.0 from a data frame; beyond 2**53 it may be off."""
    return int(value) if isinstance(value, float) and abs(value) <= 2**53 and value.is_integer() else value


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_stop(value: object) -> bool:
    return is_text(value) and 0 < len(value) <= MAX_STOP_CHARACTERS
