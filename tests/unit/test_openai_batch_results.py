"""Lines of the output and the error file."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from storage.job_records import JobRow
from storage.states import JobState
from tasks.errors import JobUnfinished
from tasks.openai_batch import error_line, output_line, result_line


def ended(state: JobState = JobState.COMPLETED, **changes: Any) -> JobRow:
    values: dict[str, Any] = {field.name: None for field in dataclasses.fields(JobRow)}
    values |= {
        "id": "batch_ab-3",
        "batch_id": "batch_ab",
        "line": 3,
        "custom_id": "x",
        "model": "m",
        "url": "/v1/chat/completions",
        "state": state,
        "attempt": 1,
        "text": "hello",
        "token_ids": (5, 6),
        "finish_reason": "stop",
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "cached_tokens": 4,
        "finished_at": 1700000000.5,
        "choices": (),
    }
    return JobRow(**{**values, **changes})


def test_a_completed_chat_job_is_an_openai_output_line() -> None:
    assert output_line(ended()) == {
        "id": "batch_req_ab-3",
        "custom_id": "x",
        "response": {
            "status_code": 200,
            "request_id": "batch_ab-3.1",
            "body": {
                "id": "chatcmpl-ab-3.1",
                "object": "chat.completion",
                "created": 1700000000,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "hello", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 7,
                    "completion_tokens": 2,
                    "total_tokens": 9,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
        },
        "error": None,
    }


def test_a_completion_carries_its_text_in_the_choice() -> None:
    body = output_line(ended(url="/v1/completions"))["response"]["body"]

    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]


@pytest.mark.parametrize(
    ("job", "code", "message"),
    [
        (
            ended(JobState.FAILED, text=None, error_type="context_length_exceeded", error_message="too long"),
            "context_length_exceeded",
            "too long",
        ),
        (ended(JobState.FAILED, text=None), "internal_error", "the job failed"),
        (ended(JobState.CANCELLED, text=None), "cancelled", "the job was cancelled before it had finished"),
        (
            ended(JobState.EXPIRED, text=None, error_type="batch_expired"),
            "batch_expired",
            "the batch's completion window ended before the job had finished",
        ),
        (
            ended(JobState.EXPIRED, text="", error_type="deadline_exceeded"),
            "deadline_exceeded",
            "the job's deadline passed before it had finished",
        ),
    ],
)
def test_any_other_end_is_an_error_line_with_a_code(job: JobRow, code: str, message: str) -> None:
    assert error_line(job) == {
        "id": "batch_req_ab-3",
        "custom_id": "x",
        "response": None,
        "error": {"code": code, "message": message},
    }
    assert result_line(job) == error_line(job)


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.EXPIRED])
def test_the_text_of_a_stopped_job_is_kept_beside_the_error(state: JobState) -> None:
    written = error_line(ended(state, text="Once upon"))

    assert written["shardq"] == {"partial_text": "Once upon"}
    assert written["response"] is None


def test_a_reused_result_says_whose_it_is() -> None:
    assert output_line(ended(reused_from="batch_cd-1"))["shardq"] == {"reused_from": "batch_cd-1"}
    assert "shardq" not in output_line(ended())


def test_lines_are_plain_json() -> None:
    for state in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED):
        written = result_line(ended(state))
        assert json.loads(json.dumps(written)) == written


def test_a_job_without_the_right_end_has_no_line() -> None:
    with pytest.raises(JobUnfinished):
        output_line(ended(JobState.RUNNING))
    with pytest.raises(JobUnfinished):
        error_line(ended(JobState.WAITING))
    with pytest.raises(JobUnfinished):
        error_line(ended(JobState.COMPLETED))
