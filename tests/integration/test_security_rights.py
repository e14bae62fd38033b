"""What each role does only now and then is within its rights, too: stops, restored messages, duties."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from cli.reasons import look_around
from relay.errors import RelayRefused
from relay.probe import KEPT_S
from relay.streams import RedisRelay
from storage.database import Database
from storage.states import StopReason
from storage.stops import cancel_batch
from tasks import following, heads, keys, lease, queues, results, stops
from tasks.bookkeeper import Bookkeeper
from tasks.connection import connect
from tasks.feeder import feed_once
from tasks.following import Increment
from tasks.generation import GenerationRequest, GenerationTask, known_versions
from tasks.kept_database import publish, refuse_other_database
from tasks.publish import Publisher
from tasks.reconciler import Reconciler
from tasks.rejected import num_rejected, rejected, remove, take_in
from tasks.restorer import Restorer
from tasks.settings import BookkeeperSettings
from tasks.stopper import Stopper
from tasks.watching import ServedQueues
from tests.bookkeeping import PROFILE, head_info, outcome, submit
from tests.secured_servers import HEAD_ID, MODEL, SecuredServers, secured_servers


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServers]:
    with secured_servers(tmp_path_factory.mktemp("host") / "server") as started:
        yield started


def test_heads_and_tails_may_measure_their_way_to_the_wire_server_and_onlookers_may_not(
    running: SecuredServers,
) -> None:
    for user in ("head-gpu-a", "tail-gpu-b", "client"):
        variables = running.variables(user)
        url, authority = variables["SHARDQ_RELAY_URL"], variables["SHARDQ_TLS_CA"]
        with closing(RedisRelay(f"{url}?ssl_ca_certs={authority}")) as relay:
            if user == "client":
                with pytest.raises(RelayRefused):
                    relay.probe()
            else:
                assert relay.probe().mbit_per_s_up > 0
    with running.wire.admin() as admin:
        (left, *_) = admin.keys("shardq:probe:*")
        assert 0 < admin.ttl(left) <= KEPT_S
        assert admin.xlen(left) == 1


@pytest.fixture
def servers(running: SecuredServers) -> SecuredServers:
    """With an empty queue server on which nothing was denied yet."""
    with running.queue.admin() as admin:
        admin.flushall()
    running.denied()
    return running


def test_the_dashboard_may_ask_which_names_are_served(servers: SecuredServers) -> None:
    with servers.queue.admin() as admin:
        heads.register_profile(admin, MODEL, PROFILE)
    shown = [queue.name for queue in ServedQueues(settings_of(servers, "flower"))]
    assert shown == [keys.queue(MODEL, version) for version in known_versions()]
    assert servers.denied() == []


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(f"sqlite:///{tmp_path / 'jobs.sqlite3'}") as opened:
        yield opened


def settings_of(servers: SecuredServers, user: str) -> BookkeeperSettings:
    variables = servers.variables(user)
    return BookkeeperSettings(broker_url=variables["SHARDQ_BROKER_URL"], tls_ca=servers.ca)


def head_of(servers: SecuredServers) -> redis.Redis:
    """A client of the head's account, which has said that it is there."""
    head = connect(settings_of(servers, f"head-{HEAD_ID}"))
    heads.register_profile(head, MODEL, PROFILE)
    heads.claim(head, head_info(HEAD_ID))
    return head


def take(servers: SecuredServers, number: int) -> None:
    """Let messages look as if the head had taken them and died."""
    with servers.queue.admin() as admin:
        for tag in range(number):
            message = admin.rpop(keys.queue(MODEL))
            admin.hset(keys.unacked(HEAD_ID), str(tag), f'[{message}, "{keys.queue(MODEL)}", "{keys.queue(MODEL)}"]')
            admin.zadd(keys.unacked_index(HEAD_ID), {str(tag): time.time()})


def test_a_head_may_do_all_that_a_head_does(servers: SecuredServers, database: Database) -> None:
    with closing(head_of(servers)) as head:
        batch = submit(database, 2)
        feed_once(database, settings_of(servers, "client"))
        take(servers, 2)
        heads.beat(head, head_info(HEAD_ID))
        assert heads.restore_unacked(head, HEAD_ID) == 2
        task = GenerationTask(f"{batch}-1", 1, batch, "c1", MODEL, GenerationRequest("Hi", None, 7))
        for instance in ("one", "two"):
            assert lease.acquire(head, task.task_id, HEAD_ID, instance).state is lease.LeaseState.HELD
        assert lease.give_up_try(head, task.task_id, "two")
        assert lease.renew(head, [task.task_id], HEAD_ID) == {task.task_id: lease.LeaseState.HELD}
        assert stops.flagged(head, [task.task_id]) == {}
        assert following.followed(head, [task.task_id]) == {}
        following.publish(head, task.task_id, [Increment(0, 0, "Hi")], anew=True)
        results.publish_started(head, task, HEAD_ID, time.time())
        results.publish_outcome(head, outcome(task.job, head=HEAD_ID))
        assert results.is_done(head, task.task_id)
        lease.release(head, "other-1.1", HEAD_ID)
        heads.withdraw(head, HEAD_ID)
    assert servers.denied() == []


def test_the_bookkeeper_may_do_all_of_its_duties(servers: SecuredServers, database: Database) -> None:
    settings = settings_of(servers, "bookkeeper")
    with closing(head_of(servers)) as head, closing(connect(settings)) as client, Publisher(settings) as publisher:
        batch = submit(database, 4)
        bookkeeper = Bookkeeper(settings, database, client, publisher)
        bookkeeper.turn(threading.Event(), block_ms=10)
        assert queues.num_waiting(client, MODEL) == 4
        take(servers, 1)
        results.publish_outcome(head, outcome(f"{batch}-4"))
        with servers.queue.admin() as admin:
            admin.xadd(keys.RESULTS, {"nonsense": "x"})
        results.publish_outcome(head, outcome("batch_of_nobody-1"))
        bookkeeper.turn(threading.Event(), block_ms=10)
        take_in(client, database)
        kept, _ = rejected(client)
        remove(client, kept.stream, [kept.entry])
        cancel_batch(database, batch)
        stopper = Stopper(database, client)
        stopper.turn()
        assert stops.all_flagged(client)
        assert stops.flagged(head, sorted(stops.all_flagged(client)))[f"{batch}-1.1"] is StopReason.CANCELLED
        reconciler = Reconciler(database, client, publisher, 0.0)
        reconciler.scan(0.0)
        restorer = Restorer(client)
        heads.withdraw(head, HEAD_ID)
        for now in range(12):
            restorer.turn(float(now))
        assert queues.num_unacked(client, HEAD_ID) == 0
        stops.unflag(client, sorted(stops.all_flagged(client)))
        assert heads.forget_model(client, MODEL)
        bookkeeper.close()
    assert servers.denied() == []


def test_an_account_of_an_earlier_version_queues_as_before_and_is_told_what_it_cannot_know(
    servers: SecuredServers, database: Database
) -> None:
    head_of(servers).close()
    with closing(connect(settings_of(servers, f"head-{HEAD_ID}"))) as may_not_ask:
        assert "this account may not ask" in (refuse_other_database(may_not_ask, database) or "")
    servers.denied()


def test_a_client_may_look_and_what_it_may_not_is_told_in_words(
    servers: SecuredServers, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_of(servers).close()
    for name, value in servers.variables("client").items():
        monkeypatch.setenv(name, value)
    with closing(connect(settings_of(servers, "bookkeeper"))) as bookkeeper:
        publish(bookkeeper, database)
    system = look_around(database=database)
    assert (system.problem, system.other_database) == (None, None)
    with closing(connect(settings_of(servers, "client"))) as client:
        following.follow(client, "b-1.1")
        following.go_on(client, "b-1.1")
        assert following.told(client, "b-1.1", "0") == []
        assert num_rejected(client) == (0, 0)
    assert [info.head_id for info in system.heads] == [HEAD_ID]
    assert servers.denied() == []
