"""Lines of the output and the error file."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from openai.types import Batch, BatchError, Completion
from openai.types.chat import ChatCompletion

from cli.batches import batch_json
from storage.batch_records import BatchFigures, BatchRow, Counts
from storage.job_records import ChoiceRow, JobRow
from storage.states import BatchStatus, JobState
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


def read_as(kind: Any, value: Any) -> Any:
    """`value` as a typed client reads it: through JSON, every field checked by its type."""
    return kind.model_validate_json(json.dumps(value), strict=True)


def stored_batch(status: BatchStatus, **changes: Any) -> BatchRow:
    values: dict[str, Any] = {field.name: None for field in dataclasses.fields(BatchRow)}
    values |= {
        "id": "batch_ab",
        "file_hash": "0f",
        "status": status,
        "counts": Counts(completed=1, failed=1),
        "parameters": {},
        "priority": 5,
        "num_invalid_lines": 0,
        "created_at": 1700000000.5,
    }
    return BatchRow(**{**values, **changes})


def measured_figures() -> BatchFigures:
    values: dict[str, Any] = {field.name: 1 for field in dataclasses.fields(BatchFigures)}
    return BatchFigures(**{**values, "counts": Counts(completed=1)})


@pytest.mark.parametrize("status", BatchStatus)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"name": "nightly", "endpoint": "/v1/completions", "expires_at": 1700003600.5},
        {"in_progress_at": 1700000001.2, "completed_at": 1700000002.2, "parameters": {"model": "m"}},
    ],
)
def test_a_batch_is_one_of_openais_for_typed_clients(status: BatchStatus, changes: dict[str, Any]) -> None:
    for figures in (None, measured_figures()):
        batch = read_as(Batch, batch_json(stored_batch(status, **changes), figures))
        assert (batch.id, batch.status, batch.created_at) == ("batch_ab", status, 1700000000)
        assert batch.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
        assert batch.completion_window == ("1h" if "expires_at" in changes else "never")
        assert batch.endpoint == changes.get("endpoint", "/v1/chat/completions")


@pytest.mark.parametrize(("url", "kind"), [("/v1/chat/completions", ChatCompletion), ("/v1/completions", Completion)])
def test_results_are_openais_completions_for_typed_clients(url: str, kind: Any) -> None:
    others = (ChoiceRow("bye", (7,), "length"),)
    for job in (ended(url=url), ended(url=url, choices=others), ended(url=url, finish_reason="length")):
        completion = read_as(kind, output_line(job)["response"]["body"])
        assert completion.usage.completion_tokens == 2
        assert len(completion.choices) == 1 + len(job.choices)


def test_an_error_is_openais_for_typed_clients() -> None:
    error = read_as(BatchError, error_line(ended(JobState.FAILED, error_message="too long"))["error"])
    assert (error.code, error.message) == ("internal_error", "too long")
