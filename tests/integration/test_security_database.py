"""`client.env` used as `init-server` prints it: with PostgreSQL's address in it, whoever submits gets the results."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from storage.database import Database
from tasks import results
from tasks.bookkeeper import Bookkeeper
from tasks.connection import connect
from tasks.heads import register_profile
from tasks.publish import Publisher
from tasks.settings import BookkeeperSettings
from tests.bookkeeping import PROFILE, outcome
from tests.cli_runner import PROMPTS, Shardq, error_of
from tests.integration.storage_databases import PostgresServer
from tests.secured_servers import HEAD_ID, MODEL, SecuredServers, secured_servers

pytest_plugins = ["tests.integration.storage_databases"]


@pytest.fixture
def servers(tmp_path: Path, postgres: PostgresServer) -> Iterator[SecuredServers]:
    with secured_servers(tmp_path / "server", "--database", postgres.new_database()) as running:
        yield running


def test_a_client_elsewhere_submits_and_reads_results_with_its_env_file_alone(
    servers: SecuredServers, tmp_path: Path
) -> None:
    kept = servers.variables("bookkeeper")
    settings = BookkeeperSettings(broker_url=kept["SHARDQ_BROKER_URL"], tls_ca=servers.ca)
    client = Shardq(tmp_path / "elsewhere", servers.variables("client"))
    with (
        closing(connect(settings)) as queue,
        closing(connect(BookkeeperSettings(broker_url=broker_of(servers), tls_ca=servers.ca))) as head,
        Publisher(settings) as publisher,
        Database.open(kept["SHARDQ_DATABASE_URL"]) as database,
        closing(Bookkeeper(settings, database, queue, publisher)) as bookkeeper,
    ):
        register_profile(head, MODEL, PROFILE)
        bookkeeper.turn(threading.Event(), block_ms=0)
        batch = client("submit", "-", "--model", MODEL, stdin=PROMPTS).stdout.strip()
        for line in (1, 2):
            results.publish_outcome(head, outcome(f"{batch}-{line}", head=HEAD_ID))
        bookkeeper.turn(threading.Event(), block_ms=0)
    assert len(client("results", batch, "--json").stdout.splitlines()) == 2
    assert client("status", batch).exit_code == 0
    assert servers.denied() == []

    own = Shardq(tmp_path / "elsewhere", {**servers.variables("client"), "SHARDQ_DATABASE_URL": client.database_url})
    refusal = error_of(own("submit", "-", "--model", MODEL, stdin=PROMPTS))
    assert "not queued, the results would go elsewhere: the bookkeeper that ran last kept database db_" in refusal
    assert f" at {database.place}" in refusal


def broker_of(servers: SecuredServers) -> str:
    """The queue server as the head reaches it."""
    return servers.variables(f"head-{HEAD_ID}")["SHARDQ_BROKER_URL"]
