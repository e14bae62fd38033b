"""`shardq head --whole` beside a split pair on one queue."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.acceptance.system import System
from tests.chaos.field import signal_all
from tests.integration.test_fronts_recovery import front_pids

REQUESTS = [
    {"custom_id": f"job-{n}", "prompt": f"{n} bottles on the wall", "max_tokens": 30, "temperature": n % 2, "seed": n}
    for n in range(10)
]


@contextmanager
def frozen(system: System, head: str) -> Iterator[None]:
    """The head and its fronts stand still, until the block ends."""
    pids = [system.pid(head), *front_pids(system.pid(head))]
    signal_all(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(pids, signal.SIGCONT)


def wait_taken(system: System, batch: str, head: str) -> None:
    system.wait_until(lambda: head in {job.head for job in system.jobs(batch)}, f"job that {head} took")


def test_a_whole_head_works_alone_and_beside_a_split_pair_and_texts_do_not_tell_which(system: System) -> None:
    system.start_bookkeeper()
    system.wire.stop()
    system.start_head("whole-head", whole=True, slots=2)
    system.wait_consuming()
    doctor = json.loads(system.shardq("doctor", "--json").stdout)
    said = {finding["check"]: finding for finding in doctor}
    assert said["wire"]["grade"] == said["heads"]["grade"] == "ok"
    assert "the whole model in one process" in said["heads"]["text"]
    alone = system.submit(REQUESTS)
    assert system.wait_for(alone).counts.completed == len(REQUESTS)
    assert {(job.head, job.wire_bytes_up) for job in system.jobs(alone)} == {("whole-head", 0)}

    system.wire.start()
    system.start_tail()
    system.start_head("split-head", slots=2)
    system.wait_consuming(2)
    assert {head.head_id: head.whole for head in system.heads()} == {"whole-head": True, "split-head": False}
    listed = [line.split()[:3] for line in system.shardq("status").stdout.splitlines()]
    assert [row for row in listed if "tiny" in row] == [["split-head", "tiny", "half"], ["whole-head", "tiny", "whole"]]
    with system.slow():
        # It might do all of them before the other one has taken any.
        with frozen(system, "whole-head"):
            beside = system.submit(REQUESTS)
            wait_taken(system, beside, "split-head")
        wait_taken(system, beside, "whole-head")
        # What it has not finished within its grace, the other one does.
        assert system.stop("whole-head") == 0
    assert system.wait_for(beside).counts.completed == len(REQUESTS)
    assert {job.head for job in system.jobs(beside)} == {"whole-head", "split-head"}
    assert system.texts(beside) == system.texts(alone)
