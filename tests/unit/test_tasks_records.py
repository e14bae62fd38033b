"""Records of the results stream and what the database gets of them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from storage.states import JobState
from tasks.errors import RecordInvalid
from tasks.generation import FailureType, Outcome, StopReason
from tasks.recorder import outcome_row
from tasks.results import READ_BYTES, ResultsReader, Started, decode
from tests.bookkeeping import outcome


def test_a_started_record_is_read_back() -> None:
    value = {"job": "j", "attempt": 1, "head": "h", "at": 2.5}
    record = decode(b"1-0", {b"kind": b"started", b"json": json.dumps(value).encode()})
    assert record.content == Started("j", 1, "h", 2.5)


def test_an_outcome_is_read_back() -> None:
    sent = outcome("j")
    record = decode(b"1-0", {b"kind": b"outcome", b"json": json.dumps(sent.to_json()).encode()})
    assert record.content == sent


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        {b"kind": b"started"},
        {b"kind": b"nonsense", b"json": b"{}"},
        {b"kind": b"started", b"json": b"{"},
        {b"kind": b"started", b"json": b"[]"},
        {b"kind": b"outcome", b"json": b'{"job": "j"}'},
        {b"kind": b"outcome", b"json": b"\xff"},
    ],
)
def test_a_record_that_cannot_be_read_is_refused_by_name(fields: dict[bytes, bytes] | None) -> None:
    with pytest.raises(RecordInvalid, match="1-0"):
        decode(b"1-0", fields)


def test_a_completed_outcome_keeps_text_and_figures() -> None:
    row = outcome_row(outcome("j"))
    assert (row.state, row.text, row.token_ids, row.finish_reason) == (
        JobState.COMPLETED,
        "there",
        (1, 2, 3),
        "stop",
    )
    assert (row.decode_tps, row.tail_s, row.wire_bytes_down) == (5.0, 0.4, 20)


def test_a_failure_without_figures_keeps_its_reason() -> None:
    failed = Outcome("j", 1, "h", None, (), None, 0, FailureType.CONTEXT_LENGTH, "too long", None)
    row = outcome_row(failed)
    assert (row.state, row.error_type, row.error_message) == (
        JobState.FAILED,
        "context_length_exceeded",
        "too long",
    )
    assert row.decode_tps is None


@pytest.mark.parametrize("reason", StopReason)
def test_a_stopped_outcome_keeps_its_text_and_ends_as_what_it_was_stopped_for(reason: StopReason) -> None:
    sent = dataclasses.replace(outcome("j"), finish_reason=None, stopped=reason)
    received = Outcome.from_json(json.loads(json.dumps(sent.to_json())))
    assert received == sent
    row = outcome_row(received)
    assert (row.state, row.text) == (JobState(reason.value), "there")


def test_an_outcome_that_tells_nothing_of_stops_was_not_stopped() -> None:
    value = outcome("j").to_json()
    del value["stopped"]
    assert Outcome.from_json(value).stopped is None


class Stream:
    """A server whose stream holds records of the sizes that are named; notes how many were asked for."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.counts: list[int] = []

    def xgroup_create(self, *args: object, **options: object) -> None: ...

    def xreadgroup(self, group: str, consumer: str, streams: object, *, count: int, block: object) -> object:
        self.counts.append(count)
        taken, self.sizes = self.sizes[:count], self.sizes[count:]
        return [(b"results", [(b"1-0", {b"json": bytes(size)}) for size in taken])] if taken else None


def test_large_records_are_read_few_at_a_time_and_small_ones_many() -> None:
    stream = Stream([10] * 500 + [READ_BYTES // 4] * 202 + [2 * READ_BYTES] * 2 + [10] * 3)
    reader = ResultsReader(stream)  # type: ignore[arg-type]
    reader._pending = False
    while reader.read(0):
        pass
    assert stream.counts[:5] == [25, 50, 100, 200, 200]
    assert max(stream.counts[6:50]) == 4
    assert 1 in stream.counts
    assert stream.counts[-1] == 4


def test_an_outcome_carries_its_rounds_by_draft_and_one_of_an_older_head_has_none() -> None:
    metrics = outcome("j").metrics
    assert metrics is not None
    counted = dataclasses.replace(metrics, rounds_by_draft=((2,), (0, 1)))
    sent = dataclasses.replace(outcome("j"), metrics=counted)
    plain = json.loads(json.dumps(sent.to_json()))
    assert outcome_row(Outcome.from_json(plain)).rounds_by_draft == ((2,), (0, 1))

    del plain["metrics"]["rounds_by_draft"]
    assert outcome_row(Outcome.from_json(plain)).rounds_by_draft == ()
