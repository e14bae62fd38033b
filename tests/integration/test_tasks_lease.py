"""The admission lease of a job attempt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import keys, lease
from tasks.lease import LeaseState
from tasks.results import is_done, publish_outcome
from tests.bookkeeping import Office, open_office, outcome


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    with open_office(Path(tmp_path_factory.mktemp("lease"))) as opened:
        yield opened


def test_a_second_head_waits_while_the_first_one_holds_the_job(office: Office) -> None:
    assert lease.acquire(office.client, "a.1", "h1") is LeaseState.HELD
    assert lease.acquire(office.client, "a.1", "h2") is LeaseState.TAKEN
    assert lease.acquire(office.client, "a.1", "h1") is LeaseState.HELD


def test_a_lapsed_lease_is_free(office: Office) -> None:
    lease.acquire(office.client, "b.1", "h1", ttl_ms=30)
    time.sleep(0.1)
    assert lease.acquire(office.client, "b.1", "h2") is LeaseState.HELD


def test_a_released_lease_is_free_and_another_head_cannot_release_it(office: Office) -> None:
    lease.acquire(office.client, "c.1", "h1")
    assert not lease.release(office.client, "c.1", "h2")
    assert lease.release(office.client, "c.1", "h1")
    assert lease.acquire(office.client, "c.1", "h2") is LeaseState.HELD


def test_renewing_extends_ones_own_leases_and_tells_which_are_lost(office: Office) -> None:
    lease.acquire(office.client, "d.1", "h1", ttl_ms=1000)
    lease.acquire(office.client, "e.1", "h2")
    publish_outcome(office.client, outcome("f"))
    states = lease.renew(office.client, ["d.1", "e.1", "f.1", "g.1"], "h1")
    assert states == {
        "d.1": LeaseState.HELD,
        "e.1": LeaseState.TAKEN,
        "f.1": LeaseState.DONE,
        "g.1": LeaseState.HELD,
    }
    assert office.client.pttl(keys.job("d.1")) > 20_000


def test_once_the_outcome_is_published_nobody_gets_the_job(office: Office) -> None:
    lease.acquire(office.client, "h.1", "h1")
    publish_outcome(office.client, outcome("h"))
    assert is_done(office.client, "h.1")
    assert lease.acquire(office.client, "h.1", "h1") is LeaseState.DONE
    assert not lease.release(office.client, "h.1", "h1")
    assert is_done(office.client, "h.1")


def test_a_users_retry_is_another_job_attempt(office: Office) -> None:
    publish_outcome(office.client, outcome("i", attempt=1))
    assert lease.acquire(office.client, "i.2", "h1") is LeaseState.HELD
