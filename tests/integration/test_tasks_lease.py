"""The admission lease of a job attempt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import heads, keys, lease, stops
from tasks.generation import StopReason
from tasks.lease import Admission, LeaseState
from tasks.results import is_done, publish_outcome
from tests.bookkeeping import Office, head_info, open_office, outcome


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    with open_office(Path(tmp_path_factory.mktemp("lease"))) as opened:
        yield opened


def acquire(office: Office, task_id: str, head: str, ttl_ms: int = lease.LEASE_MS) -> LeaseState:
    return lease.acquire(office.client, task_id, head, f"{head}-1", ttl_ms).state


def test_a_second_head_waits_while_the_first_one_holds_the_job(office: Office) -> None:
    assert acquire(office, "a.1", "h1") is LeaseState.HELD
    assert acquire(office, "a.1", "h2") is LeaseState.TAKEN
    assert acquire(office, "a.1", "h1") is LeaseState.HELD


def test_a_lapsed_lease_is_free(office: Office) -> None:
    acquire(office, "b.1", "h1", ttl_ms=30)
    time.sleep(0.1)
    assert acquire(office, "b.1", "h2") is LeaseState.HELD


def test_a_released_lease_is_free_and_another_head_cannot_release_it(office: Office) -> None:
    acquire(office, "c.1", "h1")
    assert not lease.release(office.client, "c.1", "h2")
    assert lease.release(office.client, "c.1", "h1")
    assert acquire(office, "c.1", "h2") is LeaseState.HELD


def test_renewing_extends_ones_own_leases_and_tells_which_are_lost(office: Office) -> None:
    acquire(office, "d.1", "h1", ttl_ms=1000)
    acquire(office, "e.1", "h2")
    publish_outcome(office.client, outcome("f"))
    heads.beat(office.client, head_info("h1"))
    states = lease.renew(office.client, ["d.1", "e.1", "f.1", "g.1"], "h1")
    assert states == {
        "d.1": LeaseState.HELD,
        "e.1": LeaseState.TAKEN,
        "f.1": LeaseState.DONE,
        "g.1": LeaseState.HELD,
    }
    assert office.client.pttl(keys.job("d.1")) > 10_000


def test_a_head_that_looks_dead_takes_no_lapsed_lease_again(office: Office) -> None:
    acquire(office, "u.1", "hung")
    states = lease.renew(office.client, ["u.1", "v.1"], "hung")
    assert states == {"u.1": LeaseState.HELD, "v.1": LeaseState.TAKEN}
    assert acquire(office, "v.1", "h2") is LeaseState.HELD


def test_once_the_outcome_is_published_nobody_gets_the_job(office: Office) -> None:
    acquire(office, "h.1", "h1")
    publish_outcome(office.client, outcome("h"))
    assert is_done(office.client, "h.1")
    assert acquire(office, "h.1", "h1") is LeaseState.DONE
    assert not lease.release(office.client, "h.1", "h1")
    assert is_done(office.client, "h.1")


def test_a_users_retry_is_another_job_attempt(office: Office) -> None:
    publish_outcome(office.client, outcome("i", attempt=1))
    assert acquire(office, "i.2", "h1") is LeaseState.HELD


def test_each_engine_that_gets_the_job_is_one_try(office: Office) -> None:
    first = lease.acquire(office.client, "j.1", "h1", "one")
    again = lease.acquire(office.client, "j.1", "h1", "one")
    successor = lease.acquire(office.client, "j.1", "h1", "two")
    lease.release(office.client, "j.1", "h1")
    other = lease.acquire(office.client, "j.1", "h2", "three")
    assert [it.tries for it in (first, again, successor, other)] == [1, 1, 2, 3]
    assert office.client.ttl(keys.tries("j.1")) > 23 * 3600


def test_a_job_handed_back_in_good_order_was_no_try(office: Office) -> None:
    lease.acquire(office.client, "k.1", "h1", "one")
    assert lease.give_up_try(office.client, "k.1", "one")
    lease.release(office.client, "k.1", "h1")
    assert lease.acquire(office.client, "k.1", "h2", "two").tries == 1
    assert not lease.give_up_try(office.client, "k.1", "one")


def test_a_head_that_must_wait_does_not_count(office: Office) -> None:
    lease.acquire(office.client, "l.1", "h1", "one")
    assert lease.acquire(office.client, "l.1", "h2", "two") == Admission(LeaseState.TAKEN, 0, None)
    assert office.client.scard(keys.tries("l.1")) == 1


def test_a_stopped_job_is_admitted_to_be_ended_and_is_no_try(office: Office) -> None:
    stops.flag(office.client, {"m.1": StopReason.CANCELLED})
    assert lease.acquire(office.client, "m.1", "h1", "one") == Admission(LeaseState.HELD, 0, StopReason.CANCELLED)
    assert not office.client.exists(keys.tries("m.1"))


def test_the_tries_of_an_ended_job_are_forgotten(office: Office) -> None:
    lease.acquire(office.client, "n.1", "h1", "one")
    publish_outcome(office.client, outcome("n"))
    assert not office.client.exists(keys.tries("n.1"))


def test_a_dead_heads_leases_are_free_at_once_and_no_others(office: Office) -> None:
    acquire(office, "o.1", "h1")
    acquire(office, "p.1", "h2")
    assert lease.release_all(office.client, ["o.1", "p.1", "q.1"], "h1") == 1
    assert acquire(office, "o.1", "h3") is LeaseState.HELD
    assert acquire(office, "p.1", "h3") is LeaseState.TAKEN


def test_flags_are_read_in_one_go_and_forgotten_when_told(office: Office) -> None:
    stops.flag(office.client, {"r.1": StopReason.CANCELLED, "s.1": StopReason.EXPIRED})
    assert stops.flagged(office.client, ["r.1", "t.1", "s.1"]) == {
        "r.1": StopReason.CANCELLED,
        "s.1": StopReason.EXPIRED,
    }
    assert stops.unflag(office.client, ["r.1", "t.1"]) == 1
    assert stops.flagged(office.client, ["r.1"]) == stops.flagged(office.client, []) == {}
