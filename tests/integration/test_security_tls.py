"""Who is talked to over TLS: the server that was meant, and nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from kombu.exceptions import OperationalError
from redis.asyncio import Redis as AsyncRedis

from relay.errors import RelayRefused
from relay.settings import RelaySettings
from relay.streams import RedisRelay
from tasks.app import make_app
from tasks.connection import connect, ping
from tasks.errors import QueueRefused
from tasks.settings import TaskSettings
from tests.secured_servers import SecuredServers, init_server, secured_servers
from tests.tls_proxy import TlsProxy


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServers]:
    with secured_servers(tmp_path_factory.mktemp("host") / "server") as running:
        yield running


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another installation's files: a certificate for the same names from another authority."""
    directory = tmp_path_factory.mktemp("stranger") / "server"
    init_server(directory, "--host", "localhost")
    return directory


def url_of(servers: SecuredServers, user: str = "bookkeeper") -> str:
    return servers.variables(user)["SHARDQ_BROKER_URL"]


def with_client(url: str, authority: Path | None) -> None:
    client = connect(TaskSettings(broker_url=url, tls_ca=authority))
    try:
        ping(client)
    finally:
        client.close()


def with_relay(url: str, authority: Path | None) -> None:
    relay = RedisRelay(url, settings=RelaySettings(tls_ca=authority))
    try:
        relay.ping()
    finally:
        relay.close()


def with_kombu(url: str, authority: Path | None) -> None:
    with make_app(TaskSettings(broker_url=url, tls_ca=authority)).connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0)


def with_celery_backend(url: str, authority: Path | None) -> None:
    make_app(TaskSettings(broker_url=url, tls_ca=authority)).backend.client.ping()


#: every way in which the product connects; Flower's is tried below
WAYS: list[Callable[[str, Path | None], None]] = [with_client, with_relay, with_kombu, with_celery_backend]
REFUSALS = (QueueRefused, RelayRefused, redis.ConnectionError, OperationalError)


@pytest.mark.parametrize("way", WAYS)
def test_the_right_certificate_is_accepted(servers: SecuredServers, way: Callable[[str, Path | None], None]) -> None:
    way(url_of(servers), servers.ca)
    way(f"{url_of(servers)}?ssl_ca_certs={servers.ca}", None)


@pytest.mark.parametrize("way", WAYS)
def test_a_certificate_of_an_unknown_authority_is_not(
    servers: SecuredServers, stranger: Path, way: Callable[[str, Path | None], None]
) -> None:
    for authority in (None, stranger / "ca" / "ca.crt"):
        with pytest.raises(REFUSALS, match="CERTIFICATE_VERIFY_FAILED"):
            way(url_of(servers), authority)


@pytest.mark.parametrize("way", WAYS)
def test_a_stranger_with_a_certificate_for_the_same_names_is_not_believed(
    servers: SecuredServers, stranger: Path, way: Callable[[str, Path | None], None]
) -> None:
    files = stranger / "tls"
    with TlsProxy(servers.queue.plain_port, files / "server.crt", files / "server.key") as proxy:
        url = url_of(servers).replace(f":{servers.queue.port}/", f":{proxy.port}/")
        with pytest.raises(REFUSALS, match="CERTIFICATE_VERIFY_FAILED"):
            way(url, servers.ca)


@pytest.mark.parametrize("way", WAYS)
def test_a_certificate_for_another_host_is_not_accepted(
    servers: SecuredServers, way: Callable[[str, Path | None], None]
) -> None:
    # the same machine by an address that is not in the certificate
    files, host = servers.directory / "tls", "127.0.0.2"
    with TlsProxy(servers.queue.plain_port, files / "server.crt", files / "server.key", host=host) as proxy:
        parts = urlsplit(url_of(servers))
        url = f"rediss://{parts.username}:{parts.password}@{host}:{proxy.port}/0"
        with pytest.raises(REFUSALS, match="CERTIFICATE_VERIFY_FAILED"):
            way(url, servers.ca)


@pytest.mark.parametrize("way", WAYS)
def test_verification_can_be_switched_off_explicitly(
    servers: SecuredServers, way: Callable[[str, Path | None], None]
) -> None:
    way(f"{url_of(servers)}?ssl_cert_reqs=none", None)


def test_an_address_without_tls_of_a_server_with_tls_says_which_scheme_to_write(servers: SecuredServers) -> None:
    plain = url_of(servers).replace("rediss://", "redis://")
    with pytest.raises(QueueRefused, match="speaks TLS: write rediss:// in SHARDQ_BROKER_URL"):
        with_client(plain, None)
    with pytest.raises(RelayRefused, match="speaks TLS: write rediss:// in SHARDQ_RELAY_URL"):
        with_relay(plain, None)


def test_an_address_with_tls_of_a_server_without_says_which_scheme_to_write(
    servers: SecuredServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a plain Redis waits for the end of a line that a handshake need not have
    monkeypatch.setattr("relay.greeting.HANDSHAKE_S", 0.5)
    url = url_of(servers).replace(f":{servers.queue.port}/", f":{servers.queue.plain_port}/")
    with pytest.raises(QueueRefused, match="speaks no TLS: write redis:// in SHARDQ_BROKER_URL"):
        with_client(url, servers.ca)
    with pytest.raises(RelayRefused, match="speaks no TLS: write redis:// in SHARDQ_RELAY_URL"):
        with_relay(url, servers.ca)


def test_a_password_is_not_sent_before_the_certificate_was_accepted(servers: SecuredServers, stranger: Path) -> None:
    """The stranger's proxy passes on what it is sent: nothing may arrive."""
    with servers.queue.admin() as admin:
        before = int(admin.info("stats")["total_commands_processed"])
        files = stranger / "tls"
        with TlsProxy(servers.queue.plain_port, files / "server.crt", files / "server.key") as proxy:
            for way in WAYS:
                with pytest.raises(REFUSALS):
                    way(url_of(servers).replace(f":{servers.queue.port}/", f":{proxy.port}/"), servers.ca)
        # our own INFO
        assert int(admin.info("stats")["total_commands_processed"]) - before <= 1


async def flower_queues(url: str, authority: Path) -> list[dict[str, object]]:
    """As Flower's broker page asks."""
    from flower.utils.broker import Broker

    configuration = make_app(TaskSettings(broker_url=url, tls_ca=authority)).conf
    broker = Broker(
        configuration.broker_url,
        broker_options=configuration.broker_transport_options,
        broker_use_ssl=configuration.broker_use_ssl,
    )
    assert isinstance(broker.redis, AsyncRedis)
    found: list[dict[str, object]] = await broker.queues(["shardq.tiny"])
    return found


def test_flower_verifies_too(servers: SecuredServers, stranger: Path) -> None:
    import asyncio

    url = url_of(servers, "flower")
    assert asyncio.run(flower_queues(url, servers.ca)) == [{"name": "shardq.tiny", "messages": 0}]
    with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        asyncio.run(flower_queues(url, stranger / "ca" / "ca.crt"))


def test_a_connection_that_is_not_accepted_says_what_to_set(servers: SecuredServers) -> None:
    with pytest.raises(QueueRefused, match=r"certificate is not accepted.*SHARDQ_TLS_CA"):
        with_client(url_of(servers), None)
    with pytest.raises(RelayRefused, match=r"certificate of Redis at rediss://bookkeeper:\*\*\*@.*SHARDQ_TLS_CA"):
        with_relay(url_of(servers), None)


def test_what_is_wrong_with_a_certificate_decides_what_to_do(servers: SecuredServers, tmp_path: Path) -> None:
    files, host = servers.directory / "tls", "127.0.0.2"
    with TlsProxy(servers.queue.plain_port, files / "server.crt", files / "server.key", host=host) as proxy:
        parts = urlsplit(url_of(servers))
        elsewhere = f"rediss://{parts.username}:{parts.password}@{host}:{proxy.port}/0"
        with pytest.raises(QueueRefused, match="the host in SHARDQ_BROKER_URL must be a name in the certificate"):
            with_client(elsewhere, servers.ca)
    empty = tmp_path / "ca.crt"
    empty.write_text("nothing")
    with pytest.raises(QueueRefused, match="the file of SHARDQ_TLS_CA holds no certificate"):
        with_client(url_of(servers), empty)
    with pytest.raises(RelayRefused, match="the file of SHARDQ_TLS_CA holds no certificate"):
        with_relay(url_of(servers), empty)
