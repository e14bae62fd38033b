"""What comes out: lines of OpenAI's Batch output and error files, written from the database's rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from storage.job_records import ChoiceRow, JobRow
from storage.states import JobState, StopCode
from tasks.errors import JobUnfinished
from tasks.logprobs import TokenLogprob, unpack
from tasks.openai_logprobs import chat_logprobs, completion_logprobs

_CHAT_URL = "/v1/chat/completions"

#: what is said of a job that was stopped
_STOPPED = {
    StopCode.CANCELLED: "the job was cancelled before it had finished",
    StopCode.BATCH_EXPIRED: "the batch's completion window ended before the job had finished",
    StopCode.DEADLINE_EXCEEDED: "the job's deadline passed before it had finished",
}


def result_line(job: JobRow) -> dict[str, Any]:
    """The line of an ended job, whichever file it belongs to. Raises JobUnfinished."""
    return output_line(job) if job.state is JobState.COMPLETED else error_line(job)


def output_line(job: JobRow) -> dict[str, Any]:
    """The output file's line of a completed job. Raises JobUnfinished for any other."""
    if job.state is not JobState.COMPLETED:
        raise JobUnfinished(f"{job.id} is {job.state}, not completed")
    response = {"status_code": 200, "request_id": _request_id(job), "body": _body(job)}
    return {**_identity(job), "response": response, "error": None, **_ours(job, reused_from=job.reused_from)}


def error_line(job: JobRow) -> dict[str, Any]:
    """The error file's line of a failed, cancelled or expired job. Raises JobUnfinished for any other."""
    code, message = error_of(job)
    error = {"code": code, "message": message}
    return {**_identity(job), "response": None, "error": error, **_ours(job, partial_text=job.text)}


def error_of(job: JobRow) -> tuple[str, str]:
    """Code and message of a failed, cancelled or expired job. Raises JobUnfinished for any other."""
    if job.state is JobState.FAILED:
        return job.error_type or "internal_error", job.error_message or "the job failed"
    if job.state not in (JobState.CANCELLED, JobState.EXPIRED):
        raise JobUnfinished(f"{job.id} is {job.state}: it has no error")
    usual = StopCode.CANCELLED if job.state is JobState.CANCELLED else StopCode.BATCH_EXPIRED
    code = StopCode(job.error_type or usual)
    return code, job.error_message or _STOPPED[code]


def input_of(job: JobRow) -> dict[str, Any]:
    """What the job was made from, `prompt` or `messages`; nothing where its request was not read."""
    request = json.loads(job.request) if job.request else {}
    return {name: request[name] for name in ("prompt", "messages") if request.get(name) is not None}


def _ours(job: JobRow, **values: str | None) -> dict[str, Any]:
    """What OpenAI's lines have no place for, under a name of ours; nothing if there is nothing."""
    given = {name: value for name, value in {**values, "metadata": job.metadata}.items() if value}
    given |= input_of(job)
    return {"shardq": given} if given else {}


def _identity(job: JobRow) -> dict[str, Any]:
    return {"id": f"batch_req_{job.id.removeprefix('batch_')}", "custom_id": job.custom_id}


def _request_id(job: JobRow) -> str:
    return f"{job.id}.{job.attempt}"


def _body(job: JobRow) -> dict[str, Any]:
    is_chat = job.url == _CHAT_URL
    prompt_tokens, completion_tokens = job.prompt_tokens or 0, job.completion_tokens or 0
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{_request_id(job).removeprefix('batch_')}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(job.finished_at or job.recorded_at or 0),
        "model": job.model,
        "choices": _choices(job, is_chat),
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": job.cached_tokens or 0},
        },
    }


def _choices(job: JobRow, is_chat: bool) -> list[dict[str, Any]]:
    first = ChoiceRow(job.text or "", job.token_ids, job.finish_reason or "")
    completions = (first, *job.choices)
    packed = json.loads(job.logprobs) if job.logprobs else [None] * len(completions)
    return [
        _choice(index, completion, unpack(logprobs), is_chat)
        for index, (completion, logprobs) in enumerate(zip(completions, packed, strict=True))
    ]


def _choice(index: int, completion: ChoiceRow, logprobs: Sequence[TokenLogprob], is_chat: bool) -> dict[str, Any]:
    text, shown = completion.text, None
    if logprobs:
        shown = chat_logprobs(logprobs) if is_chat else completion_logprobs(logprobs, text)
    content: dict[str, Any] = (
        {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
    )
    return {"index": index, **content, "logprobs": shown, "finish_reason": completion.finish_reason or None}
