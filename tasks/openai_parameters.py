"""The parameters of a request: what each may be, alone and beside the others.

Three kinds of names: those that work (`docs/parameters.md`), those of OpenAI's and vLLM's that do not work here and
are accepted only at the value that asks for nothing (`stream: false`, …), and unknown ones. `null` means "not given".
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from enum import Enum, auto
from typing import Any

from storage.request_keys import GREEDY_TEMPERATURE
from tasks.errors import ParameterInvalid
from tasks.generation import DEFAULT_MAX_TOKENS
from tasks.parameter_rules import (
    Rule,
    anything,
    boolean,
    check,
    integer,
    notes,
    number,
    only,
    printable,
    stops,
    switch_or_count,
    token_biases,
    token_ids,
    top_k,
)

#: most tokens a request may ask for; the served context is smaller, but known only at run time
MAX_TOKENS = 1_000_000
#: most completions of one request, as at OpenAI: they are one job, whose outcome travels as one message
MAX_CHOICES = 128
#: most tokens that all completions of a request may have: its outcome, a message of 64 MB, has 16 bytes for each then,
#: 5 of them for the token's id
MAX_TOGETHER = 4_000_000
#: most alternatives at a position, as at OpenAI's chats and by default in vLLM
MAX_TOP_LOGPROBS = 20
#: most log probabilities that a request may ask for: its outcome has to fit the channels that it travels on
#: (`docs/parameters.md` has the bytes)
MAX_LOGPROBS = 500_000


class Form(Enum):
    """What a request generates from; two parameters are written differently."""

    CHAT = auto()
    COMPLETION = auto()
    #: defaults for both
    EITHER = auto()


def read_parameters(
    values: Mapping[str, object], form: Form = Form.EITHER, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The checked fields of a `GenerationRequest` that `values`, or else `defaults`, set. Raises ParameterInvalid.

    `defaults` are what this function returned for `Form.EITHER`.
    """
    read = _each(values)
    _join_limits(read)
    _join_logprobs(read, form, defaults or {})
    best_of = read.pop("best_of", None)
    fields = {**(defaults or {}), **read}
    if best_of is not None and best_of != fields.get("n", 1):
        raise ParameterInvalid("best_of", f"expected the same value as n ({fields.get('n', 1)}), got {best_of}")
    if form is not Form.EITHER:  # a line may still change what does not go together
        _check_together(fields)
        _join_filters(fields)
    if form is Form.COMPLETION:
        _keep_to_chats(fields, read)
    return fields


def is_parameter(name: str) -> bool:
    """Whether `name` belongs in a request's body."""
    return name in RULES or name in _NEUTRAL or name in BODY_FIELDS


def _each(values: Mapping[str, object]) -> dict[str, Any]:
    """The values of the parameters that work, each checked alone."""
    read: dict[str, Any] = {}
    for name, value in values.items():
        if value is None and (name in RULES or name in _NEUTRAL):
            continue
        if name in RULES:
            read[name] = check(name, RULES[name], value)
        elif name in _NEUTRAL:
            check(name, _NEUTRAL[name], value)
        else:
            raise ParameterInvalid(printable(name), what_is_unknown(name))
    return read


def _join_limits(read: dict[str, Any]) -> None:
    """OpenAI's two names of one limit become one."""
    newer = read.pop("max_completion_tokens", None)
    if newer is not None and read.setdefault("max_tokens", newer) != newer:
        raise ParameterInvalid("max_completion_tokens", "expected the same value as max_tokens, or one of them")


def _join_logprobs(read: dict[str, Any], form: Form, defaults: Mapping[str, Any]) -> None:
    """A chat's `logprobs: true` with `top_logprobs: 5` becomes a completion's `logprobs: 5`; false becomes None."""
    asked, top = read.get("logprobs"), read.pop("top_logprobs", None)
    is_switch = isinstance(asked, bool)
    if form is Form.CHAT and asked is not None and not is_switch:
        raise ParameterInvalid(
            "logprobs", f"expected true or false, got {asked}: a chat has top_logprobs for the number"
        )
    if form is Form.COMPLETION and asked is True:
        raise ParameterInvalid("logprobs", f"expected an integer from 0 to {MAX_TOP_LOGPROBS} for a prompt, got true")
    if top and (form is Form.COMPLETION or not (is_switch or asked is None)):
        raise ParameterInvalid("top_logprobs", "expected only in a chat: a completion's logprobs is the number")
    wanted = asked if asked is not None else defaults.get("logprobs") is not None
    if top and not wanted:
        raise ParameterInvalid("top_logprobs", f"expected only with logprobs true, got {top}")
    if asked is False:
        read["logprobs"] = None
    elif asked is True or (form is Form.CHAT and top is not None and wanted):
        read["logprobs"] = top or 0


def _join_filters(fields: dict[str, Any]) -> None:
    """The likeliest tokens with a probability of 0 together are the likeliest alone."""
    if fields.get("top_p") == 0:
        fields.update(top_p=1.0, top_k=1)


def _keep_to_chats(fields: dict[str, Any], read: Mapping[str, Any]) -> None:
    """A prompt's control tokens are always read as such: a default says nothing of it. Raises ParameterInvalid."""
    if read.get("sanitize_control_tokens"):
        raise ParameterInvalid("sanitize_control_tokens", "expected only in a chat, got it beside a prompt")
    fields.pop("sanitize_control_tokens", None)


def _check_together(fields: Mapping[str, Any]) -> None:
    """What no parameter breaks alone. Raises ParameterInvalid."""
    num_choices, max_tokens = fields.get("n", 1), fields.get("max_tokens", DEFAULT_MAX_TOKENS)
    if fields.get("min_tokens", 0) > max_tokens:
        message = f"expected at most max_tokens ({max_tokens}), got {fields['min_tokens']}"
        raise ParameterInvalid("min_tokens", message)
    if num_choices > 1 and fields.get("temperature", 1.0) <= GREEDY_TEMPERATURE:
        message = f"expected 1 with temperature 0, got {num_choices}: every completion would be the same"
        raise ParameterInvalid("n", message)
    if num_choices * max_tokens > MAX_TOGETHER:
        what = f"n ({num_choices}) × max_tokens ({max_tokens}) = {num_choices * max_tokens}"
        raise ParameterInvalid("n", f"expected at most {MAX_TOGETHER} tokens together, got {what}")
    if fields.get("logprobs") is not None:
        _check_size(num_choices, max_tokens, fields["logprobs"])


def _check_size(num_choices: int, max_tokens: int, top: int) -> None:
    number = num_choices * max_tokens * (top + 1)
    if number > MAX_LOGPROBS:
        what = f"n ({num_choices}) × max_tokens ({max_tokens}) × {top + 1} tokens at each position"
        raise ParameterInvalid("logprobs", f"expected at most {MAX_LOGPROBS} log probabilities, got {what} = {number}")


def what_is_unknown(name: str) -> str:
    """What to say of a name that is no parameter."""
    known = [*BODY_FIELDS, *LINE_FIELDS, *RULES, *_NEUTRAL]
    similar = get_close_matches(name[:60], known, n=1, cutoff=0.75)
    return f"unknown parameter; did you mean {similar[0]}?" if similar else "unknown parameter"


#: fields of a body that are no parameters
BODY_FIELDS = ("model", "prompt", "messages")
#: fields of a line, in the short form beside the parameters
LINE_FIELDS = ("custom_id", "expires_in")

#: those that work
RULES: Mapping[str, Rule] = {
    "max_tokens": integer(1, MAX_TOKENS),
    "max_completion_tokens": integer(1, MAX_TOKENS),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": top_k,
    "min_p": number(0, 1),
    "seed": integer(-(2**63), 2**63 - 1),
    "stop": stops,
    "ignore_eos": boolean,
    "n": integer(1, MAX_CHOICES),
    "best_of": integer(1, MAX_CHOICES),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, 2, above=True),
    "logit_bias": token_biases,
    "min_tokens": integer(0, MAX_TOKENS),
    "stop_token_ids": token_ids,
    "logprobs": switch_or_count(MAX_TOP_LOGPROBS),
    "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
    "sanitize_control_tokens": boolean,
}

_NOT_GIVEN = only(None)

_NEUTRAL: Mapping[str, Rule] = {
    # of both endpoints
    "stream": only(False),
    "stream_options": _NOT_GIVEN,
    "user": anything(str, "a text"),
    # of chat completions
    "tools": only([]),
    "tool_choice": only("none", "auto"),
    "parallel_tool_calls": anything(bool, "true or false"),
    "functions": only([]),
    "function_call": only("none", "auto"),
    "response_format": only({"type": "text"}),
    "modalities": only(["text"]),
    "audio": _NOT_GIVEN,
    "prediction": _NOT_GIVEN,
    "reasoning_effort": _NOT_GIVEN,
    "verbosity": _NOT_GIVEN,
    "web_search_options": _NOT_GIVEN,
    "service_tier": only("auto", "default"),
    "metadata": notes,
    "store": anything(bool, "true or false"),
    "safety_identifier": anything(str, "a text"),
    "prompt_cache_key": anything(str, "a text"),
    "prompt_cache_retention": anything(str, "a text"),
    # of completions
    "echo": only(False),
    "suffix": only(""),
    # of vLLM
    "length_penalty": only(1),
    "bad_words": only([]),
    "use_beam_search": only(False),
    "skip_special_tokens": only(True),
    "spaces_between_special_tokens": only(True),
    "include_stop_str_in_output": only(False),
    "prompt_logprobs": _NOT_GIVEN,
    "truncate_prompt_tokens": _NOT_GIVEN,
    "add_generation_prompt": only(True),
    "continue_final_message": only(False),
    "chat_template": _NOT_GIVEN,
    "chat_template_kwargs": only({}),
    "guided_json": _NOT_GIVEN,
    "guided_regex": _NOT_GIVEN,
    "guided_choice": _NOT_GIVEN,
    "guided_grammar": _NOT_GIVEN,
    "structured_outputs": _NOT_GIVEN,
    "priority": only(0),
}
