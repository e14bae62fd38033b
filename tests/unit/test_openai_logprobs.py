"""Log probabilities on their way: packed in an outcome, stored in a row, written as OpenAI does."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from storage.job_records import JobRow
from storage.states import JobState
from tasks.generation import Choice, FinishReason, Outcome
from tasks.logprobs import Alternative, TokenLogprob, pack, unpack
from tasks.openai_results import output_line
from tasks.recorder import outcome_row


def token(number: int, text: str, logprob: float, data: bytes | None = None) -> Alternative:
    return Alternative(number, text, tuple(text.encode() if data is None else data), logprob)


#: "é!" and the end: the first character takes two tokens
FIRST = (
    TokenLogprob(token(195, "\ufffd", -0.5, b"\xc3"), (token(195, "\ufffd", -0.5, b"\xc3"), token(65, "A", -1.5))),
    TokenLogprob(token(169, "\ufffd", -2.0, b"\xa9"), (token(65, "A", -0.25), token(66, "B", -3.0))),
    TokenLogprob(token(33, "!", -0.125), (token(33, "!", -0.125), token(65, "A", -4.0))),
    TokenLogprob(token(258, "<|im_end|>", -1.0), (token(258, "<|im_end|>", -1.0), token(33, "!", -math.inf))),
)
SECOND = (TokenLogprob(token(65, "A", -0.75), (token(65, "A", -0.75), token(66, "B", -1.25))),)
OUTCOME = Outcome(
    "batch_ab-3",
    1,
    "h",
    "é!",
    (195, 169, 33, 258),
    FinishReason.STOP,
    7,
    None,
    None,
    None,
    logprobs=FIRST,
    choices=(Choice("A", (65,), FinishReason.LENGTH, SECOND),),
)


def stored(url: str, outcome: Outcome = OUTCOME) -> JobRow:
    """The row of a job that ended so."""
    recorded = outcome_row(outcome)
    values: dict[str, Any] = dict.fromkeys(JobRow.__slots__)
    copied = ("text", "token_ids", "finish_reason", "prompt_tokens", "choices", "logprobs", "attempt")
    values |= {name: getattr(recorded, name) for name in copied}
    values |= {"id": outcome.job, "custom_id": "x", "model": "m", "url": url, "state": JobState.COMPLETED}
    return JobRow(**{**values, "completion_tokens": outcome.num_tokens})


def choices(url: str) -> list[dict[str, Any]]:
    line = json.loads(json.dumps(output_line(stored(url)), allow_nan=False))
    found: list[dict[str, Any]] = line["response"]["body"]["choices"]
    return found


def test_an_outcome_with_logprobs_survives_the_trip() -> None:
    assert Outcome.from_json(json.loads(json.dumps(OUTCOME.to_json()))) == OUTCOME


def test_a_chat_has_every_token_with_its_bytes_and_its_likeliest_ones() -> None:
    first, second = choices("/v1/chat/completions")
    assert (first["index"], first["message"]["content"], first["finish_reason"]) == (0, "é!", "stop")
    assert (second["index"], second["message"]["content"], second["finish_reason"]) == (1, "A", "length")
    assert first["logprobs"]["refusal"] is None
    content = first["logprobs"]["content"]
    assert [item["logprob"] for item in content] == [-0.5, -2.0, -0.125, -1.0]
    assert content[1] == {
        "token": "\ufffd",
        "logprob": -2.0,
        "bytes": [0xA9],
        "top_logprobs": [
            {"token": "A", "logprob": -0.25, "bytes": [65]},
            {"token": "B", "logprob": -3.0, "bytes": [66]},
        ],
    }
    assert b"".join(bytes(item["bytes"]) for item in content[:3]).decode() == "é!"
    assert second["logprobs"]["content"][0]["token"] == "A"


def test_a_log_probability_that_json_cannot_say_is_openais_least_one() -> None:
    first, _ = choices("/v1/chat/completions")
    assert first["logprobs"]["content"][3]["top_logprobs"][1]["logprob"] == -9999.0


def test_a_completion_has_lists_and_says_where_its_tokens_begin() -> None:
    first, second = choices("/v1/completions")
    assert first["logprobs"] == {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "!", "<|im_end|>"],
        "token_logprobs": [-0.5, -2.0, -0.125, -1.0],
        "top_logprobs": [
            {"bytes:\\xc3": -0.5, "A": -1.5},
            {"A": -0.25, "B": -3.0, "bytes:\\xa9": -2.0},
            {"!": -0.125, "A": -4.0},
            {"<|im_end|>": -1.0, "!": -9999.0},
        ],
        "text_offset": [0, 0, 1, 2],
    }
    assert second["text"] == "A"
    assert second["logprobs"]["text_offset"] == [0]


def test_usage_counts_the_tokens_of_all_choices() -> None:
    usage = output_line(stored("/v1/completions"))["response"]["body"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 5, 12)


def test_each_token_is_described_once() -> None:
    packed = pack(FIRST)
    assert packed is not None
    assert [known["token"] for known in packed["known"]] == [195, 65, 169, 66, 33, 258]
    assert unpack(json.loads(json.dumps(packed))) == FIRST
    assert (pack(()), unpack(None)) == (None, ())


def packed(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(pack(SECOND))), **changes}


@pytest.mark.parametrize(
    "value",
    [
        7,
        [],
        {},
        packed(counts=[3]),
        packed(counts=[]),
        packed(counts=[3, -1]),
        packed(places=[0, 0, 5]),
        packed(places=[0, 0, -1]),
        packed(places=[0]),
        packed(logprobs=[0.0]),
        packed(logprobs=["x", 0, 0]),
        packed(known=[{"token": 1, "text": "a", "bytes": [256]}] * 2),
        packed(more=1),
    ],
)
def test_what_does_not_belong_together_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack(value)


@pytest.mark.parametrize(("url", "kind"), [("/v1/chat/completions", ChatCompletion), ("/v1/completions", Completion)])
def test_typed_clients_read_them(url: str, kind: Any) -> None:
    body = json.dumps(output_line(stored(url))["response"]["body"])
    first = kind.model_validate_json(body, strict=True).choices[0].logprobs
    assert len(first.content if kind is ChatCompletion else first.tokens) == len(FIRST)
