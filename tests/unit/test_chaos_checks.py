"""Every check of a chaos campaign passes on sound findings and fails on doctored ones."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from relay.profile import Profile
from storage.job_records import JobRow
from storage.states import JobState
from tasks.heads import HeadInfo
from tests.chaos import checks, remains
from tests.chaos.faults import Strike
from tests.chaos.field import Death
from tests.chaos.measure import Measured, measure, outages, stretches
from tests.chaos.plan import LONG, Fault, Kind, draw
from tests.chaos.remains import HeadLeft, Key
from tests.chaos.watch import Alive, HeadSeen, Look, Sample, TailSeen, stranded, unwell


def row(custom_id: str, **values: Any) -> JobRow:
    fields = {**dict.fromkeys(JobRow.__slots__), "custom_id": custom_id, "state": JobState.COMPLETED, **values}
    return JobRow(**fields)


def sample(at: float, *broken: str, open_jobs: dict[str, int] | None = None, nobody: tuple[str, ...] = ()) -> Sample:
    return Sample(at, broken, open_jobs if open_jobs is not None else dict.fromkeys(nobody, 1), frozenset(nobody))


def strike(kind: Kind = Kind.RESET, *, began: float = 10.0, ended: float = 12.0, number: int = 1) -> Strike:
    return Strike(Fault(number, kind, 0.0, 2.0, 0.0, False), "head-1", began, ended, 1)


def measured(kind: Kind = Kind.RESET, **values: float) -> Measured:
    return replace(Measured(strike(kind), 1.0, 2.0, 3.0, 0.0), **values)


# -- the plan -------------------------------------------------------------------------------------------------


def test_a_plan_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    assert draw(1, 100) == draw(1, 100)
    assert draw(1, 100) != draw(2, 100)


def test_a_hundred_faults_are_of_every_kind_and_none_is_rare() -> None:
    kinds = [fault.kind for fault in draw(1, 100)]
    assert set(kinds) == set(Kind)
    assert len(Kind) >= 10
    assert min(kinds.count(kind) for kind in Kind) >= 2
    assert min(kinds.count(kind) for kind in Kind if kind not in LONG) >= 4


def test_long_faults_do_not_follow_each_other() -> None:
    kinds = [fault.kind for fault in draw(4, 100)]
    assert not any(a in LONG and b in LONG for a, b in pairwise(kinds))


def test_a_shorter_list_of_kinds_is_drawn_from_alone() -> None:
    assert {fault.kind for fault in draw(1, 10, (Kind.RESET, Kind.KILL_TAIL))} == {Kind.RESET, Kind.KILL_TAIL}
    assert {fault.kind for fault in draw(1, 10, (Kind.STALL,))} == {Kind.STALL}


def test_every_kind_stands_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "chaos.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE) == list(Kind)


def test_both_ways_of_a_kind_come_in_turns() -> None:
    for kind in Kind:
        ways = [fault.hard for fault in draw(3, 100) if fault.kind is kind]
        assert all(a != b for a, b in pairwise(ways))


# -- jobs and texts -------------------------------------------------------------------------------------------


def test_jobs_recorded_once_and_completed_are_sound() -> None:
    assert checks.recorded_once(["a", "b"], [row("a"), row("b")]) == []


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([row("a")], "job b is missing"),
        ([row("a"), row("b"), row("b")], "job b stands there 2 times"),
        ([row("a"), row("b"), row("c")], "job c was never submitted"),
        ([row("a"), row("b", state=JobState.RUNNING)], "job b is running"),
        ([row("a"), row("b", state=JobState.FAILED, error_type="bad", error_message="no")], "job b is failed: bad: no"),
    ],
)
def test_a_job_that_is_missing_doubled_strange_or_not_completed_is_told(rows: list[JobRow], told: str) -> None:
    assert checks.recorded_once(["a", "b"], rows) == [told]


def test_equal_texts_are_sound_and_another_or_no_text_is_told() -> None:
    assert checks.same_texts({"a": "x", "b": None}, {"a": "x", "b": None}) == []
    assert checks.same_texts({"a": "x"}, {"a": "y"}) == ["job a: 'y' instead of 'x'"]
    assert checks.same_texts({"a": "x"}, {}) == ["job a: None instead of 'x'"]
    assert len(checks.same_texts({str(n): "x" for n in range(50)}, {})) == 11


def test_results_hold_each_job_once_and_none_as_failed() -> None:
    good = [checks.Result("a", True), checks.Result("b", True)]
    assert checks.results_complete(["a", "b"], good) == []
    assert checks.results_complete(["a", "b"], good[:1]) == ["results: job b comes 0 times"]
    assert checks.results_complete(["a"], [good[0], good[0]]) == ["results: job a comes 2 times"]
    assert checks.results_complete(["a"], [replace(good[0], ok=False)]) == ["results: job a failed"]


# -- recovery -------------------------------------------------------------------------------------------------


def test_a_job_that_is_with_nobody_for_too_long_is_told() -> None:
    assert checks.jobs_recovered([measured(wait_s=checks.RECOVERY_S)]) == []
    assert len(checks.jobs_recovered([measured(wait_s=checks.RECOVERY_S + 0.1)])) == 1


def test_a_lost_job_has_the_scans_time_on_top_and_no_more() -> None:
    assert checks.jobs_recovered([measured(lost_wait_s=checks.RECOVERY_S + checks.SCANS_S)]) == []
    assert len(checks.jobs_recovered([measured(lost_wait_s=checks.RECOVERY_S + checks.SCANS_S + 0.1)])) == 1


def test_processes_that_work_again_too_late_are_told_and_a_restarted_one_has_its_start_on_top() -> None:
    assert checks.processes_recovered([measured(whole_s=15.0)], {}) == []
    assert len(checks.processes_recovered([measured(whole_s=15.1)], {"head": 9.0})) == 1
    assert checks.processes_recovered([measured(Kind.KILL_HEAD, whole_s=23.0)], {"head": 9.0}) == []
    assert len(checks.processes_recovered([measured(Kind.KILL_HEAD, whole_s=25.0)], {"head": 9.0})) == 1


def test_a_process_that_ends_unasked_after_it_came_up_is_told() -> None:
    death = Death(1.0, "tail-1", 1, 60.0, False, "Error: no relay")
    assert len(checks.nobody_died_unasked([death])) == 1
    assert checks.nobody_died_unasked([replace(death, wanted=True), replace(death, lived_s=1.0)]) == []


# -- measuring ------------------------------------------------------------------------------------------------


def test_a_stretch_is_as_long_as_a_job_was_with_nobody_and_says_who_ended_it() -> None:
    samples = [
        sample(0.0, open_jobs={"a": 1, "b": 1}, nobody=("a", "b")),
        sample(5.0, open_jobs={"a": 1, "b": 1}, nobody=("a", "b")),
        sample(6.0, open_jobs={"a": 1, "b": 2}),
    ]
    found = {stretch.task_id: stretch for stretch in stretches(samples)}
    assert (found["a"].begin, found["a"].end, found["a"].requeued) == (0.0, 6.0, False)
    assert found["b"].requeued


def test_a_job_on_its_way_is_no_stretch_and_one_that_never_returns_is() -> None:
    on_its_way = [sample(0.0, nobody=("a",)), sample(1.0)]
    assert stretches(on_its_way) == []
    gone = [sample(float(at), nobody=("a",)) for at in range(10)]
    assert [stretch.end for stretch in stretches(gone)] == [9.0]


def test_times_count_from_the_end_of_the_fault() -> None:
    samples = [
        sample(11.0, "head-1 is down", open_jobs={"a": 1}, nobody=("a",)),
        sample(13.0, "head-1 is down", open_jobs={"a": 1}, nobody=("a",)),
        sample(18.0, open_jobs={"a": 1}),
        sample(30.0),
    ]
    (found,) = measure([strike()], samples, [11.5, 20.0])
    assert found.whole_s == pytest.approx(6.0)
    assert found.wait_s == pytest.approx(6.0)
    assert found.lost_wait_s == 0.0
    assert found.flow_s == pytest.approx(8.0)


def test_what_follows_the_next_fault_is_not_the_first_ones() -> None:
    samples = [sample(13.0), sample(21.0, "tail-1 is down"), sample(24.0, "tail-1 is down"), sample(26.0)]
    first, second = measure([strike(), strike(began=20.0, ended=20.5, number=2)], samples, [])
    assert first.whole_s == 0.0
    assert second.whole_s == pytest.approx(5.5)


def test_an_outage_counts_for_the_fault_during_which_it_began_however_long_it_lasts() -> None:
    samples = [sample(float(at), "tail-1 is down") for at in range(11, 40)] + [sample(40.0)]
    first, second = measure([strike(), strike(began=20.0, ended=20.5, number=2)], samples, [])
    assert first.whole_s == pytest.approx(28.0)
    assert second.whole_s == 0.0


def test_one_outage_is_whole_however_its_description_changes() -> None:
    samples = [sample(1.0, "head-1 is down"), sample(2.0, "head-1 takes no jobs"), sample(3.0, "tail-1 is down")]
    assert sorted(outages(samples)) == [(1.0, 3.0), (3.0, 3.0)]


def test_what_still_starts_is_not_bad_and_anything_else_is() -> None:
    mixed = replace(sample(1.0, "head-1 is down", "the queue server is away"), booting=frozenset({"head-1"}))
    assert mixed.bad == ("the queue server is away",)


def test_a_job_whose_message_was_destroyed_counts_as_lost() -> None:
    samples = [sample(float(at), nobody=("a",)) for at in range(12, 20)] + [sample(20.0)]
    (found,) = measure([strike(Kind.LOSE_READY)], samples, [])
    assert (found.wait_s, found.lost_wait_s) == (0.0, pytest.approx(8.0))


# -- what works, and who has a job ----------------------------------------------------------------------------

PROFILE = Profile(**dict.fromkeys(Profile.__dataclass_fields__, 0))  # type: ignore[arg-type]
INFO = HeadInfo("head-1", "i", "tiny", PROFILE, 4, ("a.1",), True, 1, 0.0, 100.0)
HEAD = Alive(7, 90.0, 2)
SOUND = Look(
    heads=(HeadSeen(INFO, 1.0),), tails=(TailSeen("tail-1", 100.0, 1.0),), bookkeeper=9, queued=frozenset({"q.1"})
)
EXPECTED = {"head-1": HEAD, "tail-1": Alive(8, 95.0), "bookkeeper": Alive(9, 80.0)}


def test_a_sound_system_is_well() -> None:
    assert unwell(SOUND, EXPECTED) == ()


@pytest.mark.parametrize(
    ("look", "told"),
    [
        (replace(SOUND, silent=("queue",)), "the queue server is away"),
        (replace(SOUND, bookkeeper=None), "bookkeeper is not at work"),
        (replace(SOUND, bookkeeper=10), "bookkeeper is not at work"),
        (replace(SOUND, tails=()), "tail-1 is not there"),
        (replace(SOUND, tails=(TailSeen("tail-1", 90.0, 1.0),)), "tail-1 is not there"),
        (replace(SOUND, tails=(TailSeen("tail-1", 100.0, 8.0),)), "tail-1 is not there"),
        (replace(SOUND, heads=()), "head-1 is not there"),
        (replace(SOUND, heads=(HeadSeen(INFO, 8.0),)), "head-1 is not there"),
        (replace(SOUND, heads=(HeadSeen(replace(INFO, started_at=80.0), 1.0),)), "head-1 is not there"),
        (replace(SOUND, heads=(HeadSeen(replace(INFO, consuming=False), 1.0),)), "head-1 takes no jobs"),
    ],
)
def test_what_does_not_work_is_told(look: Look, told: str) -> None:
    assert unwell(look, EXPECTED) == (told,)


def test_a_process_that_is_down_and_a_missing_front_are_told() -> None:
    assert unwell(SOUND, {**EXPECTED, "tail-1": None}) == ("tail-1 is down",)
    assert unwell(SOUND, {**EXPECTED, "head-1": replace(HEAD, num_fronts=1)}) == ("head-1 has 1 fronts",)


def test_a_job_is_with_somebody_in_a_ready_list_or_in_an_engine_that_lives() -> None:
    assert stranded(SOUND, EXPECTED, ["a.1", "q.1", "x.1"]) == {"x.1"}


def test_what_a_dead_engine_told_counts_no_more() -> None:
    assert stranded(SOUND, {**EXPECTED, "head-1": None}, ["a.1"]) == {"a.1"}
    assert stranded(SOUND, {**EXPECTED, "head-1": replace(HEAD, started_at=120.0)}, ["a.1"]) == {"a.1"}
    assert stranded(replace(SOUND, heads=(HeadSeen(INFO, 9.0),)), EXPECTED, ["a.1"]) == {"a.1"}


# -- what is left ---------------------------------------------------------------------------------------------


def test_a_head_at_rest_holds_nothing() -> None:
    assert remains.leaked_slots([HeadLeft("head-1", 0, ())]) == []
    assert len(remains.leaked_slots([HeadLeft("head-1", 1, ())])) == 1
    assert len(remains.leaked_slots([HeadLeft("head-1", 0, ("a.1",))])) == 1


QUEUE = {
    "shardq:models": Key("hash", None, 1),
    "shardq:heads": Key("set", None, 2),
    "shardq:bookkeeper": Key("string", 9000, 20, "host:1:x"),
    "shardq:head:head-1": Key("string", 9000, 900, "{}"),
    "shardq:results": Key("stream", None, 0),
    "shardq:job:a.1": Key("string", 3_000_000, 4, "done"),
    "shardq:tries:a.1": Key("set", 3_000_000, 1),
    "_kombu.binding.shardq.tiny": Key("set", None, 1),
    "shardq.tiny:bell": Key("stream", None, 1),
}


def test_a_queue_server_at_rest_is_sound() -> None:
    assert remains.leaked_queue_keys(QUEUE, ["head-1"], 0) == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("shardq:job:b.1", Key("string", 20_000, 10, "held:head-1")),
        ("shardq.tiny", Key("list", None, 1)),
        ("shardq:head-1.unacked", Key("hash", None, 1)),
        ("shardq:head-1.unacked_index", Key("zset", None, 1)),
        ("shardq:results", Key("stream", None, 1)),
        ("shardq:results:rejected", Key("stream", None, 1)),
        ("shardq:stops", Key("hash", None, 1)),
        ("shardq:tries:b.1", Key("set", None, 1)),
        ("shardq:heads", Key("set", None, 11)),
        ("_kombu.binding.shardq.tiny", Key("set", None, 65)),
        ("shardq.tiny:bell", Key("stream", None, 2)),
        ("something", Key("string", None, 1, "x")),
    ],
)
def test_what_is_left_on_the_queue_server_is_told(name: str, key: Key) -> None:
    (problem,) = remains.leaked_queue_keys({**QUEUE, name: key}, ["head-1"], 0)
    assert name in problem


def test_records_that_were_read_and_not_settled_are_told() -> None:
    assert len(remains.leaked_queue_keys(QUEUE, ["head-1"], 3)) == 1


WIRE = {
    "shardq:tail:tail-1-0123abcd": Key("string", 9000, 400, "{}"),
    "shardq:tail:tail-1-0123abcd:lease": Key("string", 9000, 20, "head-1/x"),
    "shardq:link:tail-1-0123abcd:epoch": Key("string", 3_000_000, 1, "5"),
    "shardq:link:tail-1-0123abcd:hello:up": Key("stream", 200_000, 1),
    "shardq:link:tail-1-0123abcd:5:0:up": Key("stream", 299_000, 32),
    "shardq:link:tail-9-0123abcd:2:0:up": Key("stream", 100_000, 32),
}


def test_a_wire_server_at_rest_is_sound_and_a_dead_tails_streams_go_by_themselves() -> None:
    assert remains.leaked_wire_keys(WIRE, ["tail-1-0123abcd"]) == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("shardq:link:tail-1-0123abcd:4:0:up", Key("stream", 100_000, 1)),
        ("shardq:link:tail-9-0123abcd:1:0:up", Key("stream", None, 1)),
        ("shardq:link:tail-9-0123abcd:1:0:up", Key("stream", 999_000, 1)),
        ("shardq:tail:tail-9-0123abcd:lease", Key("string", None, 1, "x")),
    ],
)
def test_what_is_left_on_the_wire_server_is_told(name: str, key: Key) -> None:
    assert len(remains.leaked_wire_keys({**WIRE, name: key}, ["tail-1-0123abcd"])) == 1


def test_sockets_of_engines_that_are_gone_are_told() -> None:
    assert remains.leaked_sockets(["shardq-a", "shardq-b"], 2) == []
    assert len(remains.leaked_sockets(["shardq-a", "shardq-b", "shardq-c"], 2)) == 1


PROCESSES = {
    1: "python -P -m cli.main bookkeeper",
    2: "python -P -m cli.main tail --model x",
    3: "python -P -m cli.main head --model x",
    4: "python -m workers.head.front",
    5: "python -m workers.head.front",
}
WORKERS = ["bookkeeper", "tail-1", "head-1"]


def test_processes_that_are_all_wanted_are_sound() -> None:
    assert remains.leaked_processes(PROCESSES, WORKERS) == []


def test_a_front_of_a_dead_head_a_missing_tail_and_a_stranger_are_told() -> None:
    assert len(remains.leaked_processes({**PROCESSES, 6: "python -m workers.head.front"}, WORKERS)) == 1
    assert len(remains.leaked_processes({k: v for k, v in PROCESSES.items() if k != 2}, WORKERS)) == 1
    assert len(remains.leaked_processes({**PROCESSES, 6: "python -P -m cli.main submit x"}, WORKERS)) == 1
