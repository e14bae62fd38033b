"""`shardq show`: everything that is stored of one job."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from cli.batches import shown_metadata
from cli.control_characters import visible_lines
from cli.errors import NotFound
from cli.options import database_option, json_option
from cli.output import NOTHING, counted, figure, moment, percent, print_json, print_values, size
from cli.terminal import opened_client
from cli.where_time_went import TimeSpent, print_time_spent
from storage.job_records import JobRow
from storage.states import TERMINAL_STATES, JobState
from tasks.openai_results import error_of


@click.command("show")
@click.argument("job")
@json_option
@database_option
def show_command(job: str, as_json: bool) -> None:
    """One job: request, text, figures, where its time went.

    JOB is BATCH-LINE, where BATCH is an id, the beginning of one, or a name; the ids of result lines (batch_req_…) and
    of the dashboard (….ATTEMPT) are understood too.

    \b
    shardq show nightly-17
    shardq show batch_req_6ddf-17 --json
    """
    with opened_client() as client:
        row = client.find(job)
        if not isinstance(row, JobRow):
            raise NotFound(f"{job!r} is a batch: `shardq stats {job}`, or one of its jobs as {job}-LINE")
        request = json.loads(client.request(row.id))
    if as_json:
        print_json(job_json(row, request))
    else:
        _print(row, request)


def job_json(job: JobRow, request: dict[str, Any]) -> dict[str, Any]:
    """A job with its request, error and times as plain JSON values."""
    values = asdict(job)
    del values["logprobs"], values["request"]
    code, message = _error(job)
    return {
        **values,
        "error": {"code": code, "message": message} if code else None,
        "time_spent": _time_spent(job).to_json(),
        "request": request,
    }


def _error(job: JobRow) -> tuple[str | None, str | None]:
    if job.state not in TERMINAL_STATES or job.state == JobState.COMPLETED:
        return None, None
    return error_of(job)


def _time_spent(job: JobRow) -> TimeSpent:
    return TimeSpent.of_job(
        slot_s=_slot_s(job),
        queue_s=job.queue_s,
        draft_s=job.draft_s,
        head_s=job.head_s,
        link_s=job.link_s,
        tail_s=job.tail_s,
    )


def _slot_s(job: JobRow) -> float | None:
    return None if job.started_at is None or job.finished_at is None else job.finished_at - job.started_at


def _print(job: JobRow, request: dict[str, Any]) -> None:
    print_values({**_identity(job), **_figures(job)})
    click.echo()
    if job.started_at is not None:
        print_time_spent(_time_spent(job))
        click.echo()
    click.echo("request")
    click.echo(_indented(json.dumps(request, ensure_ascii=False, indent=2)))
    for number, text in enumerate([job.text, *(choice.text for choice in job.choices)]):
        if text is not None:
            click.echo(f"\ntext{f' of choice {number}' if job.choices else ''}")
            click.echo(_indented(text))


def _identity(job: JobRow) -> dict[str, str | None]:
    code, message = _error(job)
    return {
        "job": job.id,
        "custom_id": job.custom_id,
        "batch": f"{job.batch_id}, line {job.line}",
        "model": f"{job.model}, {job.url}",
        "metadata": shown_metadata(job.metadata),
        "state": str(job.state) + (f": {job.finish_reason}" if job.finish_reason else ""),
        "error": f"{code}: {message}" if code else None,
        "stop": f"{job.stop_reason}" if job.stop_reason and job.state not in TERMINAL_STATES else None,
        "attempts": f"{job.attempt}, queued {counted(job.deliveries, 'time')}",
        "records": _records(job),
        "reused from": job.reused_from,
        "head": job.head,
    }


def _records(job: JobRow) -> str | None:
    """What came in beside the outcome that counts."""
    if not (job.duplicate_records or job.stale_records):
        return None
    return f"{job.duplicate_records} duplicate, {job.stale_records} of other attempts"


def _figures(job: JobRow) -> dict[str, str | None]:
    if job.recorded_at is None:
        return {"queued": moment(job.queued_at)}
    return {
        "queued": moment(job.queued_at),
        "started": moment(job.started_at),
        "finished": f"{moment(job.finished_at)}, {figure(_slot_s(job), 2)} s in its slot",
        "recorded": moment(job.recorded_at),
        "tokens": f"{_count(job.prompt_tokens)} prompt ({_count(job.cached_tokens)} cached), "
        f"{_count(job.completion_tokens)} completion",
        "first token": f"after {figure(job.ttft_s, 3)} s",
        "speed": f"{figure(job.decode_tps)} tokens/s decoding, {figure(job.e2e_tps)} from start to end",
        "rounds": f"{_count(job.rounds)}, {figure(job.tokens_per_round, 2)} tokens per round",
        "drafts": f"{_count(job.accepted)} of {_count(job.drafted)} tokens accepted, "
        f"{percent(job.accepted or 0, job.drafted or 0)}",
        "wire": f"{_size(job.wire_bytes_up)} up, {_size(job.wire_bytes_down)} down, {job.wire_dtype or NOTHING}",
    }


def _count(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"


def _size(num_bytes: int | None) -> str:
    return NOTHING if num_bytes is None else size(num_bytes)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in visible_lines(text).split("\n"))
