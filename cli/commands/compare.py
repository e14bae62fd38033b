"""`shardq compare`: two batches of the same prompts side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click

from cli.control_characters import visible
from cli.database import opened
from cli.errors import CliError, ExitCode
from cli.options import database_option, json_option
from cli.output import NOTHING, counted, figure, print_json, print_table, warn
from cli.speeds import speeds
from storage.batch_records import BatchRow
from storage.batches import get_batch
from storage.comparison import Difference, first_difference, only_in, pairs, shared_key
from storage.database import Database
from storage.job_records import JobRow
from storage.states import JobState

#: characters shown before and after the first that differs
_AROUND = 16
#: custom_ids named of those that only one batch has
_NAMED = 5


@dataclass(slots=True)
class Comparison:
    """What was found so far. Of the jobs themselves only the first `limit` that differ are kept."""

    matched_by: str
    limit: int
    same: int = 0
    different: int = 0
    #: pairs of which at least one has not completed
    incomplete: int = 0
    other_prompts: int = 0
    only_a: tuple[int, list[str]] = (0, [])
    only_b: tuple[int, list[str]] = (0, [])
    examples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Every job of each batch has a partner with the same text."""
        return not (self.different or self.incomplete or self.only_a[0] or self.only_b[0])

    def add(self, a: JobRow, b: JobRow, *, same_prompt: bool) -> None:
        """Count a pair."""
        self.other_prompts += not same_prompt
        if a.state != JobState.COMPLETED or b.state != JobState.COMPLETED:
            self.incomplete += 1
            return
        difference = first_difference(a, b)
        if difference is None:
            self.same += 1
            return
        self.different += 1
        if len(self.examples) < self.limit:
            self.examples.append(_example(a, b, difference))


#: figures of `cli.speeds` as people call them
_NAMES = {
    "batch_tps": "tokens/s in all",
    "decode_tps_p50": "decode tokens/s (P50)",
    "ttft_s_p50": "first token, s (P50)",
    "e2e_s_p50": "start to end, s (P50)",
    "queue_s_p50": "queue, s (P50)",
    "acceptance": "acceptance",
    "tokens_per_round": "tokens per round",
    "completion_tokens": "completion tokens",
    "wire_bytes_up": "bytes up",
}


@click.command("compare")
@click.argument("a")
@click.argument("b")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(0), help="How many differing jobs to show.")
@json_option
@database_option
@click.pass_context
def compare_command(ctx: click.Context, a: str, b: str, limit: int, as_json: bool) -> None:
    """Two batches of the same prompts side by side.

    Which texts differ and where first, and which batch was faster. A and B are ids, beginnings of them, or names.
    Jobs are matched by custom_id, or by line if the batches have no custom_id in common. Texts and, where both jobs
    have them, token ids are compared; of several completions all.

    Exit status: 0 if every job has a partner with the same text, 3 if not.

    \b
    shardq compare nightly nightly-int8
    shardq compare nightly nightly-int8 --json
    """
    with opened() as database:
        rows = get_batch(database, a), get_batch(database, b)
        if rows[0].id == rows[1].id:
            raise CliError(f"{a!r} and {b!r} are the same batch: name two")
        found = compare(database, rows[0], rows[1], limit)
        speed = speeds(database, rows[0].id), speeds(database, rows[1].id)
    if as_json:
        print_json(_to_json(rows, found, speed))
    else:
        _print(rows, found, speed)
    ctx.exit(ExitCode.OK if found.is_same else ExitCode.JOBS_FAILED)


def compare(database: Database, a: BatchRow, b: BatchRow, limit: int) -> Comparison:
    """Two batches job by job, in bounded memory."""
    key = shared_key(database, a.id, b.id)
    found = Comparison(key, limit)
    for pair in pairs(database, a.id, b.id, key):
        found.add(pair.a, pair.b, same_prompt=pair.same_prompt)
    found.only_a = only_in(database, a.id, b.id, key, limit=_NAMED)
    found.only_b = only_in(database, b.id, a.id, key, limit=_NAMED)
    return found


def _example(a: JobRow, b: JobRow, difference: Difference) -> dict[str, Any]:
    return {
        "custom_id": a.custom_id,
        "line_a": a.line,
        "line_b": b.line,
        "choice": difference.choice,
        "token": difference.token,
        "character": difference.character,
        "around_a": _around(difference.text_a, difference.character),
        "around_b": _around(difference.text_b, difference.character),
        "finish_reason_a": a.finish_reason,
        "finish_reason_b": b.finish_reason,
    }


def _around(text: str, character: int | None) -> str:
    place = len(text) if character is None else character
    return text[max(0, place - _AROUND) : place + _AROUND]


def _to_json(
    rows: tuple[BatchRow, BatchRow], found: Comparison, speed: tuple[dict[str, Any], dict[str, Any]]
) -> dict[str, Any]:
    return {
        "a": {"id": rows[0].id, "name": rows[0].name, "speed": speed[0]},
        "b": {"id": rows[1].id, "name": rows[1].name, "speed": speed[1]},
        "matched_by": found.matched_by,
        "same": found.is_same,
        "pairs": {"same": found.same, "different": found.different, "incomplete": found.incomplete},
        "other_prompts": found.other_prompts,
        "only_in_a": {"number": found.only_a[0], "first": found.only_a[1]},
        "only_in_b": {"number": found.only_b[0], "first": found.only_b[1]},
        "differences": found.examples,
    }


def _print(rows: tuple[BatchRow, BatchRow], found: Comparison, speed: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for name, row in zip("AB", rows, strict=True):
        click.echo(f"{name} is {row.id}" + (f" ({visible(row.name)})" if row.name else ""))
    number = found.same + found.different + found.incomplete
    click.echo(f"{counted(number, 'pair')} by {found.matched_by}: {', '.join(_counts(found))}")
    for name, (alone, first) in (("A", found.only_a), ("B", found.only_b)):
        if alone:
            named = visible(", ".join(first))
            click.echo(f"only in {name}: {counted(alone, 'job')}, {named}{', …' if alone > len(first) else ''}")
    if found.examples:
        _print_examples(found)
    click.echo()
    print_table(
        ["FIGURE", "A", "B", "B/A"],
        [(_NAMES[name], _cell(x), _cell(y), _ratio(x, y)) for name, x, y in _side_by_side(*speed)],
        numbers={"A", "B", "B/A"},
    )
    if found.other_prompts:
        warn(f"{counted(found.other_prompts, 'pair')} have different prompts: are these batches of the same file?")


def _counts(found: Comparison) -> Iterator[str]:
    yield f"{found.same:,} with the same text"
    yield f"{found.different:,} different"
    if found.incomplete:
        yield f"{found.incomplete:,} not completed"


def _print_examples(found: Comparison) -> None:
    click.echo()
    has_choices = any(example["choice"] for example in found.examples)
    print_table(
        ["CUSTOM_ID", *(["CHOICE"] if has_choices else []), "TOKEN", "CHAR", "A", "B"],
        [
            (
                example["custom_id"],
                *([example["choice"]] if has_choices else []),
                example["token"],
                example["character"],
                _one_line(example["around_a"]),
                _one_line(example["around_b"]),
            )
            for example in found.examples
        ],
        numbers={"CHOICE", "TOKEN", "CHAR"},
        ids={"CUSTOM_ID"},
    )
    if found.different > len(found.examples):
        click.echo(f"… and {found.different - len(found.examples):,} more (--limit)")


def _one_line(text: str) -> str:
    """With its line ends and quotes visible."""
    return repr(text)[1:-1]


def _side_by_side(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, float | None, float | None]]:
    for name in a:
        yield name, a[name], b[name]


def _cell(value: float | None) -> str:
    return figure(value, 2 if value is not None and abs(value) < 100 else 0)


def _ratio(a: float | None, b: float | None) -> str:
    return NOTHING if a is None or b is None or not a else f"{b / a:.2f}"
