"""Options of `submit` for lines that do not say: which model, and the parameters of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from cli.client.orders import notes_of
from cli.errors import InputRefused
from tasks.errors import ParameterInvalid
from tasks.openai_batch import Defaults

F = TypeVar("F", bound=Callable[..., Any])

#: options that are not called what their parameter is
_SINGULAR = {"stop_token_ids": "stop_token_id"}


def _biases(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    """`ID=BIAS` each, as OpenAI's object."""
    biases: dict[str, float] = {}
    for value in values:
        token, _equals, bias = value.partition("=")
        try:
            number = float(bias)
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not ID=BIAS, as 1234=-5.") from error
        if token in biases:
            raise click.BadParameter(f"token {token} has two biases.")
        biases[token] = number
    return biases


def _names(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """`NAME=SERVED` each. Served names have no `=`."""
    names: dict[str, str] = {}
    for value in values:
        name, _equals, served = value.rpartition("=")
        if not name or not served:
            raise click.BadParameter(f"{value!r} is not NAME=SERVED, as gpt-4o-mini=llama.")
        if names.setdefault(name, served) != served:
            raise click.BadParameter(f"{name!r} has two served names.")
    return names


def read_metadata(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    """`KEY=VALUE` each."""
    notes: dict[str, str] = {}
    for value in values:
        key, equals, note = value.partition("=")
        if not equals:
            raise click.BadParameter(f"{value[:60]!r} is not KEY=VALUE, as owner=ann.")
        if key in notes:
            raise click.BadParameter(f"{key!r} is given twice.")
        notes[key] = note
    return notes_of(notes)


_MODEL_OPTIONS = (
    click.option("--model", metavar="NAME", help="Served name for lines that name none."),
    click.option(
        "--map-model",
        metavar="NAME=SERVED",
        multiple=True,
        callback=_names,
        help="Served name for lines that name another model; may be given several times.",
    ),
    click.option("--any-model", is_flag=True, help="All lines, whatever they name, are for --model or the one served."),
    click.option(
        "--expect-model",
        metavar="NAME",
        multiple=True,
        help="Queue for a served name that no head has had yet; may be given several times.",
    ),
)

_OPTIONS = (
    click.option("--max-tokens", type=int, help="For lines that do not say. Default: 512."),
    click.option("--min-tokens", type=int, help="Tokens before which no text ends by itself. Default: 0."),
    click.option("--temperature", type=float, help="0 is greedy. Default: 1."),
    click.option("--top-p", type=float, help="Default: 1, off."),
    click.option("--top-k", type=int, help="Default: 0, off."),
    click.option("--min-p", type=float, help="Default: 0, off."),
    click.option("--presence-penalty", type=float, help="-2 to 2. Default: 0, off."),
    click.option("--frequency-penalty", type=float, help="-2 to 2. Default: 0, off."),
    click.option("--repetition-penalty", type=float, help="Above 0, up to 2. Default: 1, off."),
    click.option(
        "--logit-bias",
        metavar="ID=BIAS",
        multiple=True,
        callback=_biases,
        help="Added to the logit of a token, -100 to 100; may be given several times.",
    ),
    click.option("--seed", type=int, help="Default: one drawn for each job, and stored."),
    click.option("--n", type=int, help="Completions of each prompt. Default: 1."),
    click.option("--stop", multiple=True, help="Text that ends a completion; may be given several times."),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        metavar="ID",
        type=int,
        multiple=True,
        help="Token that ends a completion; may be given several times.",
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the end-of-sequence token."),
    click.option("--logprobs", is_flag=True, default=None, help="Tell the log probability of every token."),
    click.option("--top-logprobs", type=int, help="With --logprobs: and those of so many likeliest tokens, up to 20."),
    click.option(
        "--sanitize-control-tokens",
        is_flag=True,
        default=None,
        help="Read what looks like a control token in chat messages as text.",
    ),
)


def model_options(function: F) -> F:
    """Which served name a line is for."""
    for option in reversed(_MODEL_OPTIONS):
        function = option(function)
    return function


def parameter_options(function: F) -> F:
    """All of them; they reach the command by the names of the parameters."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def defaults_of(model: str | None, map_model: dict[str, str], any_model: bool, parameters: dict[str, Any]) -> Defaults:
    """What the options say. Raises InputRefused, which names the option."""
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in parameters.items()}
    wanted = {name: None if value in ([], {}) else value for name, value in given.items()}
    try:
        return Defaults.of(model=model, map_model=map_model, any_model=any_model, **wanted)
    except ParameterInvalid as error:
        name = (error.field or "model").partition(".")[0]
        option = _SINGULAR.get(name, name).replace("_", "-")
        raise InputRefused(f"--{option}: {error.message}") from error
