"""`shardq head --until` with real processes: a head that ends by itself loses nothing."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import closing

from tasks import keys
from tasks.connection import connect
from tasks.settings import TaskSettings
from tests.acceptance.system import System


def test_a_head_does_what_it_can_finish_by_then_leaves_the_rest_in_the_queue_and_exits_0(system: System) -> None:
    system.start_bookkeeper()
    system.start_head("brief", whole=True, slots=2, until="5m")
    system.wait_consuming()
    # a single token leaves no pace to measure: the head is still taken for a slow one
    short = system.submit([{"prompt": f"{n} bottles", "max_tokens": 1} for n in range(3)])
    assert system.wait_for(short).counts.completed == 3

    long = system.submit([{"prompt": f"{n} bottles", "max_tokens": 200} for n in range(6)])
    assert system.wait_ended("brief", timeout_s=60) == 0
    taken = Counter(re.findall(rf" job taken .*job={long}-(\d+)", system.logs()))
    # another front may be about to take what this one gives back, once; what is given back does not go in circles
    assert taken
    assert max(taken.values()) <= 2
    assert {(job.attempt, job.head) for job in system.jobs(long)} == {(1, None)}
    with closing(connect(TaskSettings(broker_url=system.queue.url))) as client:
        assert sum(client.llen(name) for name in keys.ready(system.name)) == 6
