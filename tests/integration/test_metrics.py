"""`/metrics` of a live bookkeeper, its documentation, and the dashboard that reads it."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tasks import heads, keys
from tasks.bookkeeper import run
from tasks.errors import MetricsRefused
from tasks.heads import HeadInfo
from tasks.metrics_server import served_metrics
from tasks.results import publish_outcome
from tests.bookkeeping import MODEL, Office, head_info, open_office, outcome, submit
from tests.live_figures import FIGURES, GIB

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    with open_office(tmp_path_factory.mktemp("metrics")) as opened:
        yield opened


@contextmanager
def at_work(office: Office) -> Iterator[int]:
    """A bookkeeper as `shardq bookkeeper --metrics-port` runs it; its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    stop = threading.Event()
    settings = office.settings.model_copy(update={"metrics_port": port})
    thread = threading.Thread(target=run, args=(office.database, settings, stop))
    thread.start()
    try:
        yield port
    finally:
        stop.set()
        thread.join(30)


def scrape(port: int) -> dict[str, Metric]:
    """The page, by the names in it; waits for the server to begin."""
    deadline = time.monotonic() + 20
    while True:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                return {family.name: family for family in text_string_to_metric_families(page.read().decode())}
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def value(metrics: dict[str, Metric], sample: str, **labels: str) -> float:
    family = metrics[re.sub("_(total|bucket|sum|count)$", "", sample)]
    (found,) = [each.value for each in family.samples if each.name == sample and each.labels == labels]
    return found


def live_head(**changes: object) -> HeadInfo:
    info = replace(head_info("h1", live=("a.1",)), figures=FIGURES)
    return replace(info, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def metrics(office: Office) -> Iterator[dict[str, Metric]]:
    """What a bookkeeper shows that has a head with a tail, three queued jobs and a recorded outcome."""
    heads.claim(office.client, live_head())
    office.client.sadd(keys.HEADS, "dead")
    batch = submit(office.database, 3)
    with at_work(office) as port:
        deadline = time.monotonic() + 20
        while value(found := scrape(port), "shardq:queue_jobs", model=MODEL, state="queued") < 3:
            assert time.monotonic() < deadline
        publish_outcome(office.client, outcome(f"{batch}-1"))
        while value(found, "shardq:results_total", finished_reason="stop") < 1:
            assert time.monotonic() < deadline
            found = scrape(port)
        yield found


def documented() -> dict[str, str]:
    """Name without `_total` and type of every row of the table in docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(shardq:\w+)` \| (\w+) \|", text, re.MULTILINE)
    return {name.removesuffix("_total") if kind == "counter" else name: kind for name, kind in rows}


def test_every_exported_name_is_documented_with_its_type_and_every_documented_one_is_exported(
    metrics: dict[str, Metric],
) -> None:
    assert {name: family.type for name, family in metrics.items()} == documented()


def test_a_head_and_its_tail_are_told_as_they_told_themselves(metrics: dict[str, Metric]) -> None:
    head = {"model": MODEL, "head": "h1"}
    assert value(metrics, "shardq:head_up", head="h1") == 1
    assert value(metrics, "shardq:generation_tokens_total", **head) == 60
    assert value(metrics, "shardq:spec_decode_num_accepted_tokens_total", **head) == 40
    assert value(metrics, "shardq:step_seconds_total", **head, step="link") == 0.8
    assert value(metrics, "shardq:link_rtt_seconds", **head) == 0.086
    assert value(metrics, "shardq:gpu_memory_used_bytes", **head, side="tail") == GIB
    assert value(metrics, "shardq:tail_up", **head, tail="gpu-b") == 1
    assert value(metrics, "shardq:tail_compute_seconds_total", **head, tail="gpu-b") == 1.5


def test_outcomes_are_counted_by_their_end_and_their_times(metrics: dict[str, Metric]) -> None:
    assert value(metrics, "shardq:results_total", finished_reason="failed") == 0
    assert value(metrics, "shardq:time_to_first_token_seconds_count") == 1
    assert value(metrics, "shardq:time_to_first_token_seconds_bucket", le="0.1") == 1
    assert value(metrics, "shardq:e2e_request_latency_seconds_bucket", le="0.5") == 0
    assert value(metrics, "shardq:e2e_request_latency_seconds_sum") == 1.0


def test_a_dead_heads_series_end_with_it(office: Office) -> None:
    with at_work(office) as port:
        heads.beat(office.client, live_head())
        assert value(scrape(port), "shardq:head_up", head="h1") == 1
        heads.withdraw(office.client, "h1")
        assert "shardq:generation_tokens" not in scrape(port)


def test_a_port_that_is_taken_is_one_error_that_names_the_option(office: Office) -> None:
    bookkeeper = office.bookkeeper()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        with (
            pytest.raises(MetricsRefused, match="--metrics-port"),
            served_metrics(office.settings, port, bookkeeper.tally, bookkeeper.status),
        ):
            pass


def test_without_a_queue_server_the_bookkeepers_own_counts_are_left(office: Office) -> None:
    bookkeeper = office.bookkeeper()
    nowhere = office.settings.model_copy(update={"broker_url": "redis://127.0.0.1:1/0"})
    with served_metrics(nowhere, 0, bookkeeper.tally, bookkeeper.status) as port:
        found = scrape(port)
    assert value(found, "shardq:queue_up") == 0
    assert value(found, "shardq:bookkeeper_active") == 0
    assert "shardq:results" in found


def test_the_dashboard_reads_only_names_that_are_exported(metrics: dict[str, Metric]) -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "shardq.json").read_text(encoding="utf-8"))
    texts = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for text in texts for name in re.findall(r"shardq:\w+", text)}
    assert len(names) > 20
    assert names <= {sample.name for family in metrics.values() for sample in family.samples}
