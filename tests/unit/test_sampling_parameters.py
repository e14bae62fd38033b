"""The sampling parameters of a request: what each may be, and what must fit together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from storage.request_keys import request_key
from tasks.generation import GenerationRequest, GenerationTask, TokenBias
from tasks.openai_batch import Defaults, LineError, ParsedJob, parse_line

NO_DEFAULTS = Defaults()
HELLO = [{"role": "user", "content": "hello"}]

#: as the version before these parameters wrote it, and the key that it stored with it
OLD_REQUEST = (
    '{"prompt":"p","messages":null,"seed":4711,"max_tokens":512,"temperature":1.0,"top_k":0,"top_p":1.0,"min_p":0.0,'
    '"stop":[],"ignore_eos":false}'
)
OLD_KEY = "59f677afd10df2347d379f32a15ce32097be1da888d86bbeb8cdc79df33f7af3"


def parsed(defaults: Defaults = NO_DEFAULTS, **fields: Any) -> ParsedJob | LineError:
    given = fields if "messages" in fields else {"prompt": "p", **fields}
    return parse_line(1, json.dumps(given).encode(), defaults, seeds=lambda: 4711)


def request(defaults: Defaults = NO_DEFAULTS, **fields: Any) -> GenerationRequest:
    job = parsed(defaults, **fields)
    assert isinstance(job, ParsedJob), job
    return job.request


def refusal(defaults: Defaults = NO_DEFAULTS, **fields: Any) -> str:
    error = parsed(defaults, **fields)
    assert isinstance(error, LineError), error
    assert len(str(error)) < 300
    return f"{error.field}: {error.message}"


@pytest.mark.parametrize(
    "name", ["max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "n", "best_of", "logprobs"]
)
def test_a_whole_number_may_be_written_with_a_point(name: str) -> None:
    more = {"n": 2} if name == "best_of" else {}
    assert json.dumps(request(**{name: 2.0}, **more).to_json()) == json.dumps(request(**{name: 2}, **more).to_json())


def test_token_ids_may_be_written_with_a_point() -> None:
    asked = request(prompt=[1.0, 2], stop_token_ids=[9.0, 2], logit_bias={"5": 1})
    assert (asked.prompt, asked.stop_token_ids) == ((1, 2), (2, 9))
    assert [type(token) for token in (*asked.prompt, *asked.stop_token_ids)] == [int] * 4


def test_a_top_p_of_zero_leaves_the_likeliest_token_whatever_top_k_says() -> None:
    likeliest = request(top_k=1)
    assert request(top_p=0) == request(top_p=0.0, top_k=40) == likeliest
    defaults = Defaults.of(top_p=0)
    assert request(defaults) == request(defaults, top_k=40) == likeliest
    assert request(defaults, top_p=0.9) == request(top_p=0.9)


def test_every_parameter_reaches_the_request() -> None:
    asked = request(
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={"7": -100, "5": 1.5},
        min_tokens=3,
        stop_token_ids=[9, 2],
        n=3,
        best_of=3,
        logprobs=4,
    )
    assert asked == GenerationRequest(
        "p",
        None,
        4711,
        n=3,
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias=(TokenBias(5, 1.5), TokenBias(7, -100.0)),
        min_tokens=3,
        stop_token_ids=(2, 9),
        logprobs=4,
    )


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("presence_penalty", (2.1, -3, "1", True), "a number from -2 to 2"),
        ("frequency_penalty", (2.1, -3, [1], False), "a number from -2 to 2"),
        ("repetition_penalty", (0, -1, 2.1, "1"), "a number above 0, at most 2"),
        ("min_tokens", (-1, 1.5, 1_000_001, True), "an integer from 0 to 1000000"),
        ("n", (0, 129, 1.5, True), "an integer from 1 to 128"),
        ("best_of", (0, "2"), "an integer from 1 to 128"),
        ("stop_token_ids", (5, [-1], [2**31], [True], ["5"], list(range(1025))), "up to 1024 token ids in a list"),
        ("logit_bias", ([], 5, {str(n): 1 for n in range(1025)}), "an object like"),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_was_expected(
    name: str, values: tuple[object, ...], expected: str
) -> None:
    for value in values:
        assert refusal(**{name: value}).startswith(f"{name}: expected {expected}")


@pytest.mark.parametrize("key", ["the", "", "-1", "1.0", "05", " 5", "²", "2147483648", "9" * 5000])
def test_a_key_that_is_no_token_id_is_named(key: str) -> None:
    assert refusal(logit_bias={"5": 1, key: 1}).startswith(f"logit_bias.{key[:20]}")


@pytest.mark.parametrize("bias", [100.5, -101, "1", None, True])
def test_a_bias_out_of_range_is_named_with_its_token(bias: object) -> None:
    assert refusal(logit_bias={"5": 1, "6": bias}).startswith("logit_bias.6: expected a number from -100 to 100, got ")


def test_lists_are_as_long_as_promised() -> None:
    assert len(request(logit_bias={str(n): 1 for n in range(1024)}).logit_bias) == 1024
    assert len(request(stop_token_ids=list(range(1024))).stop_token_ids) == 1024


def test_more_tokens_at_least_than_at_most_is_refused_with_both() -> None:
    assert request(min_tokens=8, max_tokens=8).min_tokens == 8
    assert refusal(min_tokens=9, max_tokens=8) == "min_tokens: expected at most max_tokens (8), got 9"
    assert refusal(min_tokens=513) == "min_tokens: expected at most max_tokens (512), got 513"


def test_several_greedy_completions_would_be_one() -> None:
    assert refusal(n=2, temperature=0).startswith("n: expected 1 with temperature 0, got 2")
    assert request(n=1, temperature=0).n == 1
    assert refusal(Defaults.of(n=2), temperature=0).startswith("n: expected 1 with temperature 0")


def test_best_of_is_n() -> None:
    assert refusal(best_of=2) == "best_of: expected the same value as n (1), got 2"
    assert refusal(n=2, best_of=3) == "best_of: expected the same value as n (2), got 3"
    assert request(Defaults.of(n=2), best_of=2).n == 2


@pytest.mark.parametrize(("asked", "wanted"), [({}, None), ({"logprobs": True}, 0)])
def test_a_chat_asks_for_logprobs_with_a_switch(asked: dict[str, Any], wanted: int | None) -> None:
    assert request(messages=HELLO, **asked).logprobs == wanted
    assert request(messages=HELLO, logprobs=True, top_logprobs=20).logprobs == 20
    assert request(messages=HELLO, logprobs=False, top_logprobs=0).logprobs is None
    assert refusal(messages=HELLO, logprobs=5).startswith("logprobs: expected true or false, got 5: a chat has")
    assert refusal(messages=HELLO, top_logprobs=5) == "top_logprobs: expected only with logprobs true, got 5"
    assert refusal(messages=HELLO, logprobs=False, top_logprobs=5).startswith("top_logprobs: expected only with")
    assert refusal(messages=HELLO, logprobs=True, top_logprobs=21).startswith("top_logprobs: expected an integer")


@pytest.mark.parametrize("number", [0, 5, 20])
def test_a_completion_asks_for_logprobs_with_a_number(number: int) -> None:
    assert request(logprobs=number).logprobs == number
    assert request(logprobs=False).logprobs is None
    assert refusal(logprobs=True).startswith("logprobs: expected an integer from 0 to 20 for a prompt")
    assert refusal(logprobs=21).startswith("logprobs: expected true or false, or for a completion an integer")
    assert refusal(logprobs=5, top_logprobs=5).startswith("top_logprobs: expected only in a chat")


def test_default_logprobs_are_for_both_forms_and_a_line_can_change_them() -> None:
    defaults = Defaults.of(logprobs=True, top_logprobs=3)
    assert (request(defaults).logprobs, request(defaults, messages=HELLO).logprobs) == (3, 3)
    assert request(defaults, messages=HELLO, top_logprobs=7).logprobs == 7
    assert request(defaults, messages=HELLO, logprobs=True).logprobs == 0
    assert request(defaults, messages=HELLO, logprobs=False).logprobs is None
    assert request(defaults, logprobs=0).logprobs == 0
    assert request(defaults, top_logprobs=0).logprobs == 3


def test_more_log_probabilities_than_an_outcome_can_carry_are_refused_with_the_sum() -> None:
    assert request(logprobs=20, max_tokens=4000).logprobs == 20
    assert request(n=128, max_tokens=512).n == 128
    message = refusal(n=128, logprobs=20)
    assert message.startswith("logprobs: expected at most 500000 log probabilities, got n (128) × max_tokens (512)")


def test_more_tokens_together_than_an_outcome_can_carry_are_refused_with_the_product() -> None:
    assert request(n=128, max_tokens=31_250, temperature=1).n == 128
    assert request(max_tokens=1_000_000).max_tokens == 1_000_000
    assert refusal(n=128, max_tokens=106_000) == (
        "n: expected at most 4000000 tokens together, got n (128) × max_tokens (106000) = 13568000"
    )


def test_defaults_are_plain_json() -> None:
    defaults = Defaults.of(n=2, logit_bias={"5": 1}, stop_token_ids=[3])
    expected = {"n": 2, "logit_bias": [{"token": 5, "bias": 1.0}], "stop_token_ids": [3]}
    assert json.loads(json.dumps(defaults.to_json())) == expected


def test_a_request_without_these_parameters_is_stored_as_it_was_before_there_were_any() -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "min_tokens": 0}
    for fields in ({}, {**neutral, "logit_bias": {"5": 0}, "stop_token_ids": [], "logprobs": False}):
        job = parsed(**fields)
        assert isinstance(job, ParsedJob)
        assert job.new_job("m", 0.0).request == OLD_REQUEST
    assert request_key("m", OLD_REQUEST) == OLD_KEY
    assert GenerationRequest.from_json(json.loads(OLD_REQUEST)) == request()


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 1}},
        {"min_tokens": 1},
        {"stop_token_ids": [1]},
        {"logprobs": 0},
    ],
)
def test_each_of_these_parameters_makes_another_request(fields: dict[str, Any]) -> None:
    job = parsed(**fields)
    assert isinstance(job, ParsedJob)
    stored = job.new_job("m", 0.0).request
    assert request_key("m", stored) != OLD_KEY
    assert GenerationRequest.from_json(json.loads(stored)) == job.request
    task = GenerationTask("j", 1, "b", "c", "m", job.request)
    assert GenerationTask.from_json(json.loads(json.dumps(task.to_json()))) == task


def test_order_and_repetitions_of_token_ids_make_no_other_request() -> None:
    first = request(stop_token_ids=[5, 3, 5], logit_bias={"9": 1, "2": 3})
    assert first == request(stop_token_ids=[3, 5], logit_bias={"2": 3.0, "9": 1.0, "4": 0})


def test_control_tokens_are_sanitized_in_chats_only() -> None:
    assert request(messages=HELLO, sanitize_control_tokens=True).sanitize_control_tokens
    assert request(messages=HELLO, sanitize_control_tokens=False) == request(messages=HELLO)
    refused = refusal(sanitize_control_tokens=True)
    assert refused == "sanitize_control_tokens: expected only in a chat, got it beside a prompt"
    defaults = Defaults.of(sanitize_control_tokens=True)
    assert request(defaults, messages=HELLO).sanitize_control_tokens
    assert not request(defaults, messages=HELLO, sanitize_control_tokens=False).sanitize_control_tokens
    assert request(defaults) == request()


def test_a_request_that_sanitizes_has_another_key_and_one_that_does_not_is_written_as_before() -> None:
    usual, sanitizing = (
        json.dumps(request(messages=HELLO, sanitize_control_tokens=wanted).to_json()) for wanted in (False, True)
    )
    assert "sanitize" not in usual
    assert request_key("m", usual) != request_key("m", sanitizing)
    assert GenerationRequest.from_json(json.loads(sanitizing)).sanitize_control_tokens
