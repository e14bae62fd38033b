"""The bookkeeper against a real queue server and a real database."""

from __future__ import annotations

import base64
import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from storage.batches import get_batch
from storage.errors import DatabaseBusy, DatabaseUnavailable, DiskFull
from storage.job_records import JobRow
from storage.jobs import claim_waiting, iterate_results, window
from storage.served_models import list_models
from storage.states import BatchStatus, JobState
from storage.stops import cancel_batch
from tasks import heads, keys, lease, queues, results
from tasks.bookkeeper import Bookkeeper
from tasks.connection import translated
from tasks.errors import QueueFull, QueueUnreachable
from tasks.feeder import Feeder, feed_once
from tasks.generation import GenerationRequest, GenerationTask
from tasks.heads import register_profile
from tasks.publish import Publication
from tasks.reconciler import CONFIRM_S, Reconciler
from tests.bookkeeping import MODEL, PROFILE, Office, head_info, open_office, outcome, submit

GO_ON = threading.Event()


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with open_office(tmp_path, window_min_jobs=4000) as opened:
        yield opened


def turn(office: Office, bookkeeper: Bookkeeper, seconds: float = 0.0) -> None:
    office.clock.now += seconds
    bookkeeper.turn(GO_ON, block_ms=0)


def jobs(office: Office, batch: str) -> list[JobRow]:
    return list(iterate_results(office.database, batch))


def waiting(office: Office) -> Counter[str]:
    return Counter(queues.waiting_ids(office.client, MODEL))


def take(office: Office, number: int, head_id: str | None = None) -> list[GenerationTask]:
    """Take messages as a head does; with a head id they are its own now, without they vanish."""
    taken = []
    for _ in range(number):
        raw: Any = office.client.rpop(keys.queue(MODEL))
        message = json.loads(raw)
        if head_id:
            tag = message["properties"]["delivery_tag"]
            value = json.dumps([message, "", keys.queue(MODEL)])
            office.client.hset(keys.unacked(head_id), tag, value)
            office.client.zadd(keys.unacked_index(head_id), {tag: 1.0})
            office.client.sadd(keys.HEADS, head_id)
        taken.append(_task(message))
    return taken


def _task(message: dict[str, Any]) -> GenerationTask:
    return GenerationTask.from_json(json.loads(base64.b64decode(message["body"]))[0][0])


def test_a_batch_is_fed_generated_and_recorded(office: Office) -> None:
    batch = submit(office.database, 3)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    tasks = take(office, 3)
    for task in tasks:
        results.publish_started(office.client, task, "h1", 5.0)
    turn(office, bookkeeper, 1)
    assert [job.state for job in jobs(office, batch)] == [JobState.RUNNING] * 3
    for task in tasks:
        results.publish_outcome(office.client, outcome(task.job))
    turn(office, bookkeeper, 1)
    assert [(job.state, job.text, job.head) for job in jobs(office, batch)] == [(JobState.COMPLETED, "there", "h1")] * 3
    assert get_batch(office.database, batch).status is BatchStatus.COMPLETED
    assert office.client.xlen(keys.RESULTS) == 0


def test_3000_jobs_without_a_head_for_an_hour_stand_in_the_queue_once_each(tmp_path: Path) -> None:
    with open_office(tmp_path, window_min_jobs=4000, scan_interval_s=120) as office:
        submit(office.database, 3000)
        bookkeeper = office.bookkeeper()
        turn(office, bookkeeper)
        assert queues.num_waiting(office.client, MODEL) == 3000
        for _ in range(60):
            turn(office, bookkeeper, 60)
        queued = waiting(office)
        assert len(queued) == 3000
        assert set(queued.values()) == {1}


def test_a_lost_message_is_queued_again_once_after_two_scans(office: Office) -> None:
    batch = submit(office.database, 5)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    (lost,) = take(office, 1)
    turn(office, bookkeeper, 31)
    assert lost.task_id not in waiting(office)
    for _ in range(10):
        turn(office, bookkeeper, 31)
        assert waiting(office)[lost.task_id] == 1
    assert waiting(office).total() == 5
    assert {job.deliveries for job in jobs(office, batch)} == {1, 2}


def test_the_second_message_of_a_lost_one_is_the_same_task(office: Office) -> None:
    submit(office.database, 1)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    (lost,) = take(office, 1)
    turn(office, bookkeeper, 31)
    turn(office, bookkeeper, 31)
    assert take(office, 1) == [lost]


def test_two_scans_in_short_succession_prove_nothing(office: Office) -> None:
    submit(office.database, 1)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    take(office, 1)
    turn(office, bookkeeper, 31)
    scan = next(duty for duty in bookkeeper._duties if duty.name == "look for lost jobs")
    assert scan.work(office.clock.now + CONFIRM_S - 1) == 0
    assert scan.work(office.clock.now + CONFIRM_S) == 1


def test_a_lost_job_is_back_in_the_queue_within_seconds(office: Office) -> None:
    submit(office.database, 3)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    (lost,) = take(office, 1)
    for _ in range(12):
        turn(office, bookkeeper, 1)
    assert waiting(office)[lost.task_id] == 1


def test_while_nothing_is_missing_the_queue_is_not_read(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(office.database, 3)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    turn(office, bookkeeper, 1)
    read: list[str] = []
    monkeypatch.setattr(queues, "waiting_ids", lambda _, model: read.append(model) or iter(()))
    for _ in range(20):
        turn(office, bookkeeper, 1)
    assert read == []


@pytest.mark.parametrize("sign", ["unacked", "live", "leased", "done"])
def test_a_job_with_any_sign_of_life_is_not_queued_again(office: Office, sign: str) -> None:
    submit(office.database, 1)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    (task,) = take(office, 1, "h1" if sign == "unacked" else None)
    live = (task.task_id,) if sign == "live" else ()
    if sign == "leased":
        lease.acquire(office.client, task.task_id, "h1", "h1-1", ttl_ms=100_000)
    if sign == "done":
        office.client.set(keys.job(task.task_id), lease.DONE)
    for beat in range(6):
        heads.beat(office.client, dataclasses.replace(head_info(live=live), beat=beat))
        claims: Any = office.client.zrange(keys.unacked_index("h1"), 0, -1)
        for tag in claims:
            office.client.zincrby(keys.unacked_index("h1"), 1, tag)
        turn(office, bookkeeper, 31)
    assert waiting(office).total() == 0


def test_a_job_that_shows_up_between_two_scans_starts_over(office: Office) -> None:
    submit(office.database, 1)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    (task,) = take(office, 1)
    turn(office, bookkeeper, 31)
    lease.acquire(office.client, task.task_id, "h1", "h1-1")
    turn(office, bookkeeper, 31)
    lease.release(office.client, task.task_id, "h1")
    turn(office, bookkeeper, 31)
    assert waiting(office).total() == 0
    turn(office, bookkeeper, 31)
    assert waiting(office).total() == 1


def test_while_the_recorder_is_behind_nothing_counts_as_lost(office: Office) -> None:
    submit(office.database, 1)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    (task,) = take(office, 1)
    for number in range(1500):
        results.publish_started(office.client, task, "h1", float(number))
    turn(office, bookkeeper, 31)
    turn(office, bookkeeper, 31)
    assert waiting(office).total() == 0


def test_an_outcome_that_waits_for_the_recorder_is_a_sign_of_life_and_few_are_read_at_a_time(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(office.database, 10)
    turn(office, office.bookkeeper())
    lost, *done = take(office, 10)
    for task in done:
        results.publish_outcome(office.client, outcome(task.job))
        office.client.delete(keys.job(task.task_id))  # the bookkeeper was away for an hour
    sizes: list[int] = []
    xrange = office.client.xrange

    def counted(*arguments: Any, **options: Any) -> Any:
        entries = xrange(*arguments, **options)
        sizes.append(len(entries))
        return entries

    monkeypatch.setattr(office.client, "xrange", counted)
    reconciler = Reconciler(office.database, office.client, office.publisher, 30)
    assert [reconciler.scan(now) for now in (0.0, 31.0)] == [0, 1]
    assert list(waiting(office)) == [lost.task_id]
    assert (sum(sizes), max(sizes)) == (2 * len(done), 4)


def test_what_a_head_without_presence_had_taken_is_queued_again(office: Office) -> None:
    submit(office.database, 4)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    heads.beat(office.client, head_info())
    take(office, 3, "h1")
    turn(office, bookkeeper, 3)
    assert waiting(office).total() == 1
    heads.withdraw(office.client, "h1")
    for _ in range(6):
        turn(office, bookkeeper, 1)
    assert waiting(office).total() == 4
    assert heads.known_heads(office.client) == set()


def test_the_first_record_of_an_attempt_wins_and_later_ones_are_counted(office: Office) -> None:
    batch = submit(office.database, 1)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    (task,) = take(office, 1)
    results.publish_outcome(office.client, outcome(task.job, text="first"))
    results.publish_outcome(office.client, outcome(task.job, text="second"))
    turn(office, bookkeeper, 1)
    (job,) = jobs(office, batch)
    assert (job.text, job.duplicate_records) == ("first", 1)


def test_a_record_nobody_can_read_is_put_aside_and_hurts_no_other(office: Office) -> None:
    batch = submit(office.database, 2)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    first, second = take(office, 2)
    results.publish_outcome(office.client, outcome(first.job))
    office.client.xadd(keys.RESULTS, {"kind": "outcome", "json": "{"})
    huge = outcome(first.job).to_json() | {"job": second.job, "prompt_tokens": 2**70}
    office.client.xadd(keys.RESULTS, {"kind": "outcome", "json": json.dumps(huge)})
    results.publish_outcome(office.client, outcome(second.job))
    turn(office, bookkeeper, 1)
    assert [job.text for job in jobs(office, batch)] == ["there", "there"]
    assert office.client.xlen(keys.RESULTS) == 0
    assert office.client.xlen(keys.REJECTED) == 2


def test_served_names_are_mirrored_into_the_database(office: Office) -> None:
    turn(office, office.bookkeeper())
    assert [row.name for row in list_models(office.database)] == [MODEL]


def test_jobs_for_a_head_that_never_was_wait_and_are_told_of_once(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    submit(office.database, 2, model="early")
    bookkeeper = office.bookkeeper()
    for _ in range(3):
        turn(office, bookkeeper, 60)
    assert [record.getMessage() for record in caplog.records if "first head" in record.getMessage()] == [
        "jobs wait for the first head that serves 'early'"
    ]
    assert queues.num_waiting(office.client, "early") == 0
    register_profile(office.client, "early", PROFILE)
    turn(office, bookkeeper, 60)
    assert queues.num_waiting(office.client, "early") == 2


def test_urgent_batches_are_served_first(office: Office) -> None:
    submit(office.database, 2, priority=4)
    urgent = submit(office.database, 2, priority=0)
    turn(office, office.bookkeeper())
    order = list(queues.waiting_ids(office.client, MODEL))
    assert {name.split(".")[0] for name in order[:2]} == {job.id for job in jobs(office, urgent)}


def test_without_a_head_no_more_than_the_smallest_window_is_queued(tmp_path: Path) -> None:
    with open_office(tmp_path, window_min_jobs=10, window_per_slot=4) as office:
        submit(office.database, 200)
        bookkeeper = office.bookkeeper()
        turn(office, bookkeeper)
        assert waiting(office).total() == 10
        heads.beat(office.client, head_info(slots=16))
        turn(office, bookkeeper, 1)
        assert waiting(office).total() == 64
        take(office, 5)
        turn(office, bookkeeper, 1)
        assert waiting(office).total() == 64


def test_long_prompts_fill_the_window_by_their_bytes(tmp_path: Path) -> None:
    with open_office(tmp_path, window_bytes=1_000_000) as office:
        submit(office.database, 200, prompt="é" * 12_000)
        turn(office, office.bookkeeper())
        assert 0 < waiting(office).total() < 60
        assert queues.num_waiting_bytes(office.client, MODEL) < 2_500_000


def test_feeding_pauses_while_the_server_is_short_of_memory(office: Office) -> None:
    submit(office.database, 5)
    bookkeeper = office.bookkeeper()
    used = office.client.info("memory")["used_memory"]
    office.client.config_set("maxmemory", int(used * 1.2))
    turn(office, bookkeeper)
    assert waiting(office).total() == 0
    office.client.config_set("maxmemory", 0)
    turn(office, bookkeeper, 1)
    assert waiting(office).total() == 5


def test_a_submitter_feeds_with_the_same_code(office: Office) -> None:
    submit(office.database, 7)
    assert feed_once(office.database, office.settings) == 7
    assert feed_once(office.database, office.settings) == 0
    assert waiting(office).total() == 7


def test_a_submitter_leaves_feeding_to_a_bookkeeper_at_work(office: Office) -> None:
    turn(office, office.bookkeeper())
    submit(office.database, 7)
    assert feed_once(office.database, office.settings) == 0
    assert waiting(office).total() == 0


def in_queue(office: Office) -> list[str]:
    """The batches of all waiting messages, in the order in which heads will take them."""
    names = keys.ready(MODEL)
    stored: Any = [message for name in names for message in reversed(office.client.lrange(name, 0, -1))]  # type: ignore[arg-type]
    return [_task(json.loads(message)).batch for message in stored]


def test_an_urgent_job_is_queued_at_once_however_many_others_fill_the_window(tmp_path: Path) -> None:
    with open_office(tmp_path, window_min_jobs=20) as office:
        bookkeeper = office.bookkeeper()
        usual = submit(office.database, 200, priority=5)
        turn(office, bookkeeper)
        urgent = submit(office.database, 1, priority=0)
        turn(office, bookkeeper, 1)
        assert in_queue(office) == [urgent, *[usual] * 20]


def test_less_urgent_jobs_wait_for_room_beside_more_urgent_ones(tmp_path: Path) -> None:
    with open_office(tmp_path, window_min_jobs=20) as office:
        urgent = submit(office.database, 15, priority=2)
        usual = submit(office.database, 100, priority=7)
        turn(office, office.bookkeeper())
        assert in_queue(office) == [*[urgent] * 15, *[usual] * 5]


def test_a_later_batch_of_the_same_priority_has_its_turn_after_the_next_few_jobs(tmp_path: Path) -> None:
    with open_office(tmp_path, window_min_jobs=20, window_per_slot=1) as office:
        heads.claim(office.client, head_info(slots=4))
        bookkeeper = office.bookkeeper()
        first = submit(office.database, 100, priority=5)
        turn(office, bookkeeper)
        second = submit(office.database, 3, priority=5)
        turn(office, bookkeeper, 1)
        assert in_queue(office) == [*[first] * 4, second, first, second, first, second, *[first] * 11]
        assert window(office.database, MODEL).num_jobs == 20
        in_order = [job.line for job in jobs(office, first) if job.state is JobState.QUEUED]
        assert in_order == list(range(1, 18))


def test_only_what_is_queued_and_ours_is_taken_back(tmp_path: Path) -> None:
    with open_office(tmp_path, window_min_jobs=5) as office:
        bookkeeper = office.bookkeeper()
        first = submit(office.database, 50, priority=5)
        turn(office, bookkeeper)
        foreign = json.dumps({"headers": {"id": "job-of-another-database.1"}, "body": ""})
        office.client.lpush(keys.ready_at(keys.queue(MODEL), 5), foreign)
        newest: Any = office.client.lindex(keys.ready_at(keys.queue(MODEL), 5), 1)
        begun = _task(json.loads(newest))
        results.publish_started(office.client, begun, "h1", 5.0)
        second = submit(office.database, 1, priority=5)
        turn(office, bookkeeper, 1)
        ids = Counter(queues.waiting_ids(office.client, MODEL))
        assert ids["job-of-another-database.1"] == ids[begun.task_id] == ids[f"{second}-1.1"] == 1
        assert set(ids.values()) == {1}
        assert jobs(office, first)[4].state is JobState.RUNNING
        assert begun.job == f"{first}-5"


def test_jobs_whose_queueing_failed_wait_again(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(publications: Any) -> int:
        raise QueueUnreachable("gone")

    submit(office.database, 5)
    monkeypatch.setattr(office.publisher, "publish", refuse)
    with pytest.raises(QueueUnreachable):
        Feeder(office.database, office.client, office.publisher, office.settings).feed()
    assert window(office.database, MODEL).num_jobs == 0
    assert len(claim_waiting(office.database, MODEL, max_jobs=10, max_bytes=10**6)) == 5


def test_the_publisher_shows_flower_who_but_not_what(office: Office) -> None:
    batch = submit(office.database, 1, prompt="secret words")
    turn(office, office.bookkeeper())
    raw: Any = office.client.lindex(keys.queue(MODEL), 0)
    shown = json.loads(raw)["headers"]["argsrepr"]
    assert shown == f"c1 {batch} {MODEL}"
    assert "secret" not in json.dumps(json.loads(raw)["headers"])


def test_a_second_bookkeeper_waits_for_the_first_one(office: Office) -> None:
    first, second = office.bookkeeper(), office.bookkeeper()
    turn(office, first)
    submit(office.database, 1)
    stopped = threading.Event()
    stopped.set()
    office.clock.now += 1
    second.turn(stopped)
    assert waiting(office).total() == 0
    first.close()
    turn(office, second, 1)
    assert waiting(office).total() == 1


def test_publications_of_one_task_twice_stand_twice_and_are_one_task(office: Office) -> None:
    submit(office.database, 1)
    (job,) = claim_waiting(office.database, MODEL, max_jobs=1, max_bytes=1000)
    office.publisher.publish([Publication.of(job), Publication.of(job)])
    assert list(waiting(office).values()) == [2]


@contextmanager
def full(office: Office) -> Iterator[None]:
    """The queue server takes nothing that needs memory."""
    office.client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        office.client.config_set("maxmemory", 0)


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("before", ["it went on", "it was started anew", "the database failed"])
def test_results_are_recorded_on_a_server_that_is_full_and_make_room_again(
    office: Office, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    batch = submit(office.database, 2)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    for task in take(office, 2):
        results.publish_outcome(office.client, outcome(task.job))
    with full(office):
        if before == "it was started anew":
            bookkeeper.close()
            bookkeeper = office.bookkeeper()
        if before == "the database failed":
            with monkeypatch.context() as patch:
                patch.setattr("tasks.recorder.record_outcomes", failing(DiskFull("no room")))
                with pytest.raises(DiskFull):
                    turn(office, bookkeeper, 10)
        turn(office, bookkeeper, 10)
        assert [job.state for job in jobs(office, batch)] == [JobState.COMPLETED] * 2
        assert office.client.xlen(keys.RESULTS) == 0


def test_a_full_server_without_a_reader_yet_gets_one(office: Office) -> None:
    batch = submit(office.database, 1)
    (job,) = claim_waiting(office.database, MODEL, max_jobs=1, max_bytes=1000)
    results.publish_outcome(office.client, outcome(job.id))
    with full(office):
        turn(office, office.bookkeeper())
    assert jobs(office, batch)[0].state is JobState.COMPLETED


def test_a_record_nobody_can_read_leaves_a_full_server(office: Office) -> None:
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    office.client.xadd(keys.RESULTS, {"kind": "outcome", "json": "{"})
    with full(office):
        turn(office, bookkeeper, 1)
    assert (office.client.xlen(keys.RESULTS), office.client.xlen(keys.REJECTED)) == (0, 1)


def test_cancelling_makes_room_on_a_server_that_is_full(office: Office) -> None:
    batch = submit(office.database, 2)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    cancel_batch(office.database, batch)
    with full(office):
        turn(office, bookkeeper, 10)
        assert [job.state for job in jobs(office, batch)] == [JobState.CANCELLED] * 2
        assert waiting(office).total() == 0


def test_a_duty_that_a_full_server_refuses_keeps_no_other_back(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(office.database, 2)
    monkeypatch.setattr("tasks.bookkeeper.mirror_models", failing(OutOfMemoryError("OOM")))
    with pytest.raises(QueueFull):
        turn(office, office.bookkeeper())
    assert waiting(office).total() == 2


def test_a_locked_database_is_waited_for_once_a_turn(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(office.database, 2)
    bookkeeper = office.bookkeeper()
    with monkeypatch.context() as patch:
        patch.setattr("tasks.stopper.expire_due", failing(DatabaseBusy("locked")))
        with pytest.raises(DatabaseBusy):
            turn(office, bookkeeper)
    assert waiting(office).total() == 0  # the feeder did not wait for it, too
    turn(office, bookkeeper)
    assert waiting(office).total() == 2


@pytest.mark.parametrize("message", ["not json", "[]", "{}", '{"headers": 1}', "[" * 5000])
def test_a_message_nobody_can_read_keeps_no_other_from_its_turn(office: Office, message: str) -> None:
    batch = submit(office.database, 2)
    office.client.lpush(keys.queue(MODEL), message)
    office.client.hset(keys.unacked("h1"), "tag", message)
    office.client.sadd(keys.HEADS, "h1")
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    assert waiting(office).total() == 3
    cancel_batch(office.database, batch)
    turn(office, bookkeeper, 1)
    assert [job.state for job in jobs(office, batch)] == [JobState.CANCELLED] * 2
    for _ in range(5):  # a scan for lost jobs, and a head that is gone
        turn(office, bookkeeper, 10)
    assert queues.num_unacked(office.client, "h1") == 0
    ((_, fields),) = office.client.xrange(keys.REJECTED)
    assert fields[b"json"] == message.encode()


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("maxmemory", "1", "out of memory"),
        ("min-replicas-to-write", "1", "NOREPLICAS"),
        ("replicaof", None, "read-only"),
    ],
)
def test_a_server_that_takes_nothing_is_to_be_tried_again(
    office: Office, setting: str, value: str | None, message: str
) -> None:
    if value is None:
        office.client.replicaof("127.0.0.1", "1")
    else:
        office.client.config_set(setting, value)
    with pytest.raises(QueueFull, match=message), translated():
        office.client.set("shardq:x", "y")
    with pytest.raises(QueueUnreachable):
        office.publisher.publish(
            [Publication(GenerationTask("j", 1, "b", "c", MODEL, GenerationRequest("Hi", None, 1)))]
        )


def test_a_database_that_fails_keeps_no_dead_heads_jobs_from_others(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(office.database, 2)
    bookkeeper = office.bookkeeper()
    turn(office, bookkeeper)
    take(office, 2, "h1")

    monkeypatch.setattr("tasks.recorder.record_outcomes", failing(DatabaseUnavailable("disk full")))
    monkeypatch.setattr("tasks.stopper.expire_due", failing(DatabaseUnavailable("disk full")))
    for _ in range(6):
        office.clock.now += 1
        with pytest.raises(DatabaseUnavailable):
            bookkeeper.turn(GO_ON, block_ms=0)
    assert waiting(office).total() == 2
