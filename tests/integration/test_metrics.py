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
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from relay.installed import installed_version
from storage.database import Database
from storage.stops import cancel_batch
from tasks import heads, keys
from tasks.bookkeeper import run
from tasks.errors import MetricsRefused
from tasks.heads import HeadInfo
from tasks.metric_families import FAMILIES
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
    info = replace(head_info("h1", live=("a.1",)), figures=FIGURES, version="1.2.3")
    return replace(info, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def metrics(office: Office) -> Iterator[dict[str, Metric]]:
    """What a bookkeeper shows that has a head with a tail, three queued jobs and a recorded outcome."""
    heads.say_host(office.client)
    heads.beat(office.client, live_head())
    office.client.sadd(keys.HEADS, "dead")
    batch = submit(office.database, 3)
    with at_work(office) as port:
        deadline = time.monotonic() + 20
        while value(found := scrape(port), "shardq_queue_jobs", model=MODEL, state="queued") < 3:
            assert time.monotonic() < deadline
        publish_outcome(office.client, outcome(f"{batch}-1"))
        while value(found, "shardq_results_total", model=MODEL, finished_reason="stop") < 1:
            assert time.monotonic() < deadline
            found = scrape(port)
        yield scrape(port)


def documented() -> dict[str, str]:
    """Name without `_total` and type of every row of the table in docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(shardq_\w+)` \| (\w+) \|", text, re.MULTILINE)
    assert len(rows) == len({name for name, _ in rows})
    return {name.removesuffix("_total") if kind == "counter" else name: kind for name, kind in rows}


def test_every_exported_name_is_documented_with_its_type_and_every_documented_one_is_exported(
    metrics: dict[str, Metric],
) -> None:
    ours = {name: family.type for name, family in metrics.items() if not name.startswith("process_")}
    assert ours == documented()
    assert "process_resident_memory_bytes" in metrics


def test_a_head_and_its_tail_are_told_as_they_told_themselves(metrics: dict[str, Metric]) -> None:
    head = {"model": MODEL, "head": "h1"}
    assert value(metrics, "shardq_head_up", head="h1") == 1
    assert value(metrics, "shardq_generation_tokens_total", **head) == 60
    assert value(metrics, "shardq_spec_decode_num_accepted_tokens_total", **head) == 40
    assert value(metrics, "shardq_step_seconds_total", **head, step="link") == 0.8
    assert value(metrics, "shardq_link_rtt_seconds", **head) == 0.086
    assert value(metrics, "shardq_gpu_memory_used_bytes", **head, side="tail") == GIB
    assert value(metrics, "shardq_tail_up", **head, tail="gpu-b") == 1
    assert value(metrics, "shardq_tail_compute_seconds_total", **head, tail="gpu-b") == 1.5


def test_outcomes_are_counted_by_their_end_and_their_times(metrics: dict[str, Metric]) -> None:
    assert value(metrics, "shardq_results_total", model=MODEL, finished_reason="failed") == 0
    assert value(metrics, "shardq_time_to_first_token_seconds_count", model=MODEL) == 1
    assert value(metrics, "shardq_time_to_first_token_seconds_bucket", model=MODEL, le="0.1") == 1
    assert value(metrics, "shardq_e2e_request_latency_seconds_bucket", model=MODEL, le="0.5") == 0
    assert value(metrics, "shardq_e2e_request_latency_seconds_sum", model=MODEL) == 1.0


def test_a_dead_heads_series_end_with_it(office: Office) -> None:
    with at_work(office) as port:
        heads.beat(office.client, live_head())
        assert value(scrape(port), "shardq_head_up", head="h1") == 1
        heads.withdraw(office.client, "h1")
        assert "shardq_generation_tokens" not in scrape(port)


def test_a_port_that_is_taken_is_one_error_that_names_the_option(office: Office) -> None:
    bookkeeper = office.bookkeeper()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        with (
            pytest.raises(MetricsRefused, match="--metrics-port"),
            served_metrics(office.settings, port, office.database, bookkeeper.tally, bookkeeper.status),
        ):
            pass


def test_without_a_queue_server_the_bookkeepers_own_counts_are_left(office: Office) -> None:
    bookkeeper = office.bookkeeper()
    nowhere = office.settings.model_copy(update={"broker_url": "redis://127.0.0.1:1/0"})
    with served_metrics(nowhere, 0, office.database, bookkeeper.tally, bookkeeper.status) as port:
        found = scrape(port)
    assert value(found, "shardq_queue_up") == 0
    assert value(found, "shardq_bookkeeper_active") == 0
    assert value(found, "shardq_database_up") == 1


def test_versions_and_what_heads_run_are_told_as_labels(metrics: dict[str, Metric]) -> None:
    assert value(metrics, "shardq_bookkeeper_info", version=installed_version()) == 1
    runs = {"version": "1.2.3", "dtype": "float32", "quantization": "none", "drafter": "ngram"}
    assert value(metrics, "shardq_head_info", model=MODEL, head="h1", **runs) == 1


def test_the_database_its_disk_and_the_jobs_in_it_are_told(office: Office, metrics: dict[str, Metric]) -> None:
    # three were fed, one of them has ended
    assert value(metrics, "shardq_jobs", model=MODEL, state="queued") == 2
    assert value(metrics, "shardq_database_up") == 1
    assert value(metrics, "shardq_database_size_bytes") >= 4096
    assert value(metrics, "shardq_disk_size_bytes") > value(metrics, "shardq_disk_free_bytes") > 0
    # waiting: more than the window of the feeder takes
    batch = submit(office.database, 5, model="other")
    bookkeeper = office.bookkeeper()
    with served_metrics(office.settings, 0, office.database, bookkeeper.tally, bookkeeper.status) as port:
        assert value(scrape(port), "shardq_jobs", model="other", state="waiting") == 5
    cancel_batch(office.database, batch)


def test_without_its_database_the_rest_is_left(office: Office, tmp_path: Path) -> None:
    bookkeeper = office.bookkeeper()
    with Database.open(f"sqlite:///{tmp_path / 'away.sqlite3'}") as away:
        pass
    (tmp_path / "away.sqlite3").write_bytes(b"no database at all, and longer than a header" * 100)
    with served_metrics(office.settings, 0, away, bookkeeper.tally, bookkeeper.status) as port:
        found = scrape(port)
    assert value(found, "shardq_database_up") == 0
    assert value(found, "shardq_queue_up") == 1
    assert "shardq_jobs" not in found


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metric", "/-/healthy"])
def test_other_addresses_say_where_the_metrics_are(office: Office, path: str) -> None:
    bookkeeper = office.bookkeeper()
    with (
        served_metrics(office.settings, 0, office.database, bookkeeper.tally, bookkeeper.status) as port,
        pytest.raises(HTTPError) as refused,
    ):
        urlopen(f"http://127.0.0.1:{port}{path}", timeout=10)
    with refused.value as answer:
        assert (answer.code, answer.read()) == (404, b"not here: the metrics are at /metrics\n")


def test_an_address_of_ipv6_serves_too(office: Office) -> None:
    bookkeeper = office.bookkeeper()
    settings = office.settings.model_copy(update={"metrics_host": "::1"})
    with served_metrics(settings, 0, office.database, bookkeeper.tally, bookkeeper.status) as port:
        assert b"shardq_queue_up 1" in urlopen(f"http://[::1]:{port}/metrics", timeout=10).read()


def test_no_name_or_label_breaks_prometheus_rules(metrics: dict[str, Metric]) -> None:
    for family in FAMILIES:
        assert re.fullmatch("shardq_[a-z0-9_]+", family.name)
        assert family.name.endswith("_info") == (family.kind == "info")
        assert all(re.fullmatch("[a-z_]+", label) for label in family.labels)
    assert all(":" not in name for name in metrics)


def names_in(text: str) -> set[str]:
    """Names of ours in an expression of Prometheus."""
    return set(re.findall(r"\bshardq_\w+", text))


def exported(metrics: dict[str, Metric]) -> set[str]:
    """The names of all samples."""
    return {sample.name for family in metrics.values() for sample in family.samples}


def test_the_dashboard_reads_only_names_that_are_exported(metrics: dict[str, Metric]) -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "shardq.json").read_text(encoding="utf-8"))
    names = set().union(*(names_in(target["expr"]) for panel in board["panels"] for target in panel["targets"]))
    assert len(names) > 20
    assert names <= exported(metrics)


def test_the_alert_rules_read_only_names_that_are_exported(metrics: dict[str, Metric]) -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "grafana" / "alerts.yml").read_text(encoding="utf-8"))
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len(alerts) >= 8
    for rule in alerts:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}
        assert names_in(rule["expr"]) <= exported(metrics), rule["alert"]
        told = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        labels = {label for family in FAMILIES for label in family.labels} | {"instance"}
        assert told <= labels, rule["alert"]
    config = yaml.safe_load((ROOT / "deploy" / "grafana" / "prometheus.yml").read_text(encoding="utf-8"))
    assert config["rule_files"] == ["alerts.yml"]
