"""`shardq follow`: the text of a job as it is being committed."""

from __future__ import annotations

import sys
from contextlib import closing

import click

from cli.client.references import batch_or_job
from cli.database import opened
from cli.destination import stdout_for_programs
from cli.errors import CliError, ExitCode
from cli.interruption import interruptible
from cli.live_text import LiveText, stored_text
from cli.options import broker_option, database_option, insecure_option, json_option
from cli.output import note
from storage.batch_records import BatchRow
from storage.batches import get_batch
from storage.database import Database
from storage.job_records import JobRow
from storage.jobs import get_job
from storage.states import TERMINAL_STATES, JobState
from tasks.connection import connect
from tasks.generation import REQUEST_FAILURES
from tasks.json_text import json_text
from tasks.settings import TaskSettings


@click.command("follow")
@click.argument("job", metavar="JOB")
@click.option(
    "--choice", default=0, show_default=True, type=click.IntRange(0), help="Which completion, where n is above 1."
)
@json_option
@database_option
@broker_option
@insecure_option
@click.pass_context
def follow_command(ctx: click.Context, job: str, choice: int, as_json: bool) -> None:
    """The text of a job as it is being committed.

    JOB is BATCH-LINE, or a batch of one job. First comes the text so far, then what is new, until the job ends; of
    one that has ended, the stored text. A waiting one waits, and stderr says why. Ctrl-C leaves the job alone.

    With --json: an object for every piece, with its `position` in characters, and one at the end with the `status`.
    Exit status: 0 if the job succeeded, 3 if not.

    \b
    shardq follow nightly-17
    shardq follow nightly-17 --choice 1 --json
    """
    with opened() as database, closing(connect(TaskSettings())) as client:
        row = _job(database, job)
        show = _Show(row.id, choice, as_json)
        with interruptible(show.interrupted):
            if row.state not in TERMINAL_STATES:
                row = LiveText(database, client, row, choice, show.piece, show.remark).to_the_end()
            ctx.exit(show.end(row, _again(database, row)))


def _job(database: Database, reference: str) -> JobRow:
    """The job that is meant. Raises CliError for a batch of several."""
    row = batch_or_job(database, reference)
    if not isinstance(row, BatchRow):
        return row
    if row.counts.total != 1:
        raise CliError(f"{row.id} is a batch of {row.counts.total} jobs: name one, as `shardq follow {row.id}-1`")
    return get_job(database, f"{row.id}-1")


def _again(database: Database, row: JobRow) -> str:
    if not get_batch(database, row.batch_id).is_whole:
        return f"`shardq delete {row.batch_id}`, then submit its file again"
    if row.error_type in REQUEST_FAILURES:
        return "correct its line, then submit it again"
    # without a choice a retry leaves out what was cancelled
    choice = " --cancelled" if row.state == JobState.CANCELLED else ""
    return f"`shardq retry {row.batch_id}{choice}` runs it again"


class _Show:
    """Writes pieces of one text to stdout; what was written never comes again."""

    def __init__(self, job_id: str, choice: int, as_json: bool) -> None:
        self._job_id = job_id
        self._choice = choice
        self._as_json = as_json
        self._shown = ""

    def piece(self, text: str) -> None:
        """The next piece."""
        if not text:
            return
        if self._as_json:
            self._line({"object": "job.text", "position": len(self._shown), "text": text})
        else:
            click.echo(text, nl=False)
        self._shown += text

    def remark(self, message: str) -> None:
        """A word on stderr, on a terminal below the line that was begun."""
        if sys.stdout.isatty() and self._shown and not self._shown.endswith("\n"):
            message = f"\n{message}"
        note(message)

    def end(self, row: JobRow, again: str) -> ExitCode:
        """What is left of the stored text, and how the job ended. `again`: how to run it again."""
        text = stored_text(row, self._choice)
        if text is None and row.state == JobState.COMPLETED:
            raise CliError(f"{row.id} has {row.num_choices} completions: --choice is at most {row.num_choices - 1}")
        if (text or "").startswith(self._shown):
            self.piece((text or "")[len(self._shown) :])
        else:
            note(f"the job was begun anew and wrote another text: `shardq results {row.batch_id}` has it")
        self.close()
        if self._as_json:
            reasons = [row.finish_reason, *(choice.finish_reason for choice in row.choices)]
            reason = reasons[self._choice] if self._choice < len(reasons) else None
            self._line({"object": "job.end", "status": row.state, "finish_reason": reason})
        elif row.state != JobState.COMPLETED:
            why = f": {row.error_message}" if row.error_message else ""
            note(f"{row.id} {row.state}{why} ({again})")
        return ExitCode.OK if row.state == JobState.COMPLETED else ExitCode.JOBS_FAILED

    def close(self) -> None:
        """End the line that was begun."""
        if self._shown and not self._as_json and not self._shown.endswith("\n"):
            click.echo()

    def interrupted(self) -> str:
        """End the line; what goes on."""
        self.close()
        return f"the job goes on without you: `shardq follow {self._job_id}` takes it up again"

    def _line(self, values: dict[str, object]) -> None:
        # one line each, for those who read them as they come
        who = {"job": self._job_id, "choice": self._choice}
        click.echo(json_text({**values, **who}), file=stdout_for_programs())
