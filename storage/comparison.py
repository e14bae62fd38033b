"""Two batches of the same prompts side by side: pairs of jobs, and what only one of them has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from sqlalchemy import exists, func, select

from storage.database import Database
from storage.job_records import ChoiceRow, JobRow
from storage.job_rows import PAGE, read_rows, with_large
from storage.tables import job

_a, _b = job.alias("a"), job.alias("b")


@dataclass(frozen=True, slots=True)
class Pair:
    """A job of each batch for the same prompt."""

    a: JobRow
    b: JobRow
    same_prompt: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two texts of a pair part."""

    #: the completion, counted from 0
    choice: int
    #: first token that differs; None where a text has no token ids, or where all of them are equal
    token: int | None
    #: first character that differs; None if the texts are equal and only tokens differ
    character: int | None
    text_a: str
    text_b: str


def shared_key(db: Database, a: str, b: str) -> str:
    """What matches the jobs of two batches: `custom_id`, or `line` if no custom_id is in both."""
    query = select(_a.c.id).join(_b, _b.c.custom_id == _a.c.custom_id).where(_a.c.batch_id == a, _b.c.batch_id == b)
    with db.read() as connection:
        return "line" if connection.execute(query.limit(1)).first() is None else "custom_id"


def pairs(db: Database, a: str, b: str, key: str) -> Iterator[Pair]:
    """The jobs that both batches have, in the order of A's lines, a page at a time. `key` is from `shared_key`."""
    line = 0
    while page := read_rows(db, job.c.batch_id == a, job.c.line > line):
        line = page[-1].line
        names = [getattr(row, key) for row in page]
        others = read_rows(db, job.c.batch_id == b, job.c[key].in_(names), limit=PAGE)
        if not others:
            continue
        filled = {getattr(row, key): row for row in with_large(db, others)}
        mine = [row for row in page if getattr(row, key) in filled]
        prompts = _prompts(db, [row.id for row in (*mine, *others)])
        for row in with_large(db, mine):
            other = filled[getattr(row, key)]
            # none any more: its batch was deleted meanwhile
            yield Pair(row, other, prompts.get(row.id) == prompts.get(other.id))


def only_in(db: Database, batch_id: str, other: str, key: str, *, limit: int) -> tuple[int, list[str]]:
    """How many jobs of a batch the other one has no partner for, and the custom_ids of the first of them."""
    partner = exists().where(_b.c.batch_id == other, _b.c[key] == _a.c[key])
    lonely = [_a.c.batch_id == batch_id, ~partner]
    with db.read() as connection:
        number = connection.execute(select(func.count()).select_from(_a).where(*lonely)).scalar_one()
        names = select(_a.c.custom_id).where(*lonely).order_by(_a.c.line).limit(limit)
        return int(number), [str(name) for name in connection.execute(names).scalars()]


def first_difference(a: JobRow, b: JobRow) -> Difference | None:
    """Where two jobs' completions part first; None if they are equal in text and, where both have them, tokens."""
    for number, (mine, other) in enumerate(zip_longest(_completions(a), _completions(b))):
        text_a, text_b = (mine.text if mine else ""), (other.text if other else "")
        token = _first_unequal(mine.token_ids, other.token_ids) if mine and other else None
        character = _first_unequal(text_a, text_b)
        if mine is None or other is None or token is not None or character is not None:
            return Difference(number, token, character, text_a, text_b)
    return None


def _completions(row: JobRow) -> tuple[ChoiceRow, ...]:
    return (ChoiceRow(row.text or "", row.token_ids, row.finish_reason or ""), *row.choices)


def _first_unequal(a: Sequence[object], b: Sequence[object]) -> int | None:
    """The first place where two sequences differ; None if they do not, or if one of two token lists is missing."""
    if a == b or (not isinstance(a, str) and not (a and b)):
        return None
    places = (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(places, min(len(a), len(b)))


def _prompts(db: Database, ids: Sequence[str]) -> dict[str, object]:
    with db.read() as connection:
        rows = connection.execute(select(job.c.id, job.c.request).where(job.c.id.in_(ids))).all()
    requests = ((job_id, json.loads(request)) for job_id, request in rows)
    return {job_id: [request.get("prompt"), request.get("messages")] for job_id, request in requests}
