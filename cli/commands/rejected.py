"""`shardq rejected`: what the bookkeeper could not record, and the way into the database that has the jobs."""

from __future__ import annotations

from typing import Any

import click
import redis

from cli.confirmation import confirm, yes_option
from cli.database import opened
from cli.interruption import interruptible
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import counted, moment, note, print_json, print_table
from storage.job_records import Fate
from tasks.connection import connect, translated
from tasks.rejected import Rejected, num_rejected, rejected, remove, take_in
from tasks.settings import TaskSettings


@click.command("rejected")
@click.option("--apply", "apply", is_flag=True, help="Record those whose jobs are in this database.")
@click.option("--drop", is_flag=True, help="Throw all of them away.")
@yes_option
@json_option
@database_option
@broker_option
@insecure_option
@click.pass_context
def rejected_command(ctx: click.Context, apply: bool, drop: bool, yes: bool, as_json: bool) -> None:
    """Results that came for no job, kept; take them in.

    The bookkeeper keeps, on the queue server, outcomes of jobs that its database does not have, as of another database
    or from after a backup that was restored, and records that it cannot read. With --apply those whose jobs are in
    this command's database are recorded there; what is of no job here stays. Needs the bookkeeper's account.

    \b
    shardq rejected
    shardq rejected --apply
    shardq rejected --drop
    """
    if apply and drop:
        raise click.UsageError("--apply or --drop, not both.", ctx)
    client = connect(TaskSettings())
    with translated():
        if apply:
            _apply(client, as_json)
        elif drop:
            _drop(client, yes, as_json)
        else:
            _show(client, as_json)
    client.close()


def _show(client: redis.Redis, as_json: bool) -> None:
    found = list(map(_plain, rejected(client)))
    if as_json:
        print_json(found)
        return
    if not found:
        note("nothing is kept: every record found its job")
        return
    print_table(
        ["PUT ASIDE", "JOB", "HEAD", "STATE", "WHY"],
        [(moment(row["at"]), row["job"], row["head"], row["state"], row["why"]) for row in found],
        ids={"JOB"},
    )
    note("`shardq rejected --apply` records those whose jobs are in this command's database")


def _plain(item: Rejected) -> dict[str, Any]:
    outcome = item.outcome
    if outcome is None:
        return {
            "at": item.at,
            "job": None,
            "attempt": None,
            "head": None,
            "state": "unreadable",
            "why": item.reason,
        } | {"record": item.text}
    return {
        "at": item.at,
        "job": outcome.job,
        "attempt": outcome.attempt,
        "head": outcome.head,
        "state": str(outcome.stopped or outcome.failure or "completed"),
        "why": item.reason,
        "record": item.text,
    }


def _apply(client: redis.Redis, as_json: bool) -> None:
    left_behind = "what was recorded stays so, the rest waits: the same command goes on"
    with opened() as database:
        with interruptible(lambda: left_behind):
            fates = take_in(client, database)
        place = database.place
    left = sum(num_rejected(client))
    superfluous = fates[Fate.DUPLICATE] + fates[Fate.STALE] + fates[Fate.DELETED]
    if as_json:
        print_json({"recorded": fates[Fate.APPLIED], "superfluous": superfluous, "left": left})
        return
    click.echo(f"recorded {counted(fates[Fate.APPLIED], 'outcome')}")
    if superfluous:
        note(f"{counted(superfluous, 'outcome')} of jobs that had ended or were deleted meanwhile: removed")
    if left:
        note(f"{counted(left, 'record')} left, of no job in {place}")


def _drop(client: redis.Redis, yes: bool, as_json: bool) -> None:
    number = sum(num_rejected(client))
    if number:
        with interruptible(lambda: f"{counted(sum(num_rejected(client)), 'record')} left of {number:,}"):
            confirm(f"throw away {counted(number, 'record')}", yes=yes)
            for item in rejected(client):
                remove(client, item.stream, [item.entry])
    if as_json:
        print_json({"dropped": number})
    else:
        click.echo(f"threw away {counted(number, 'record')}")
