"""The real Flower page beside real fronts, in a real browser."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import redis

from cli.processes import Processes, shardq_argv
from tasks import keys
from tasks.generation import FailureType, GenerationRequest, GenerationTask, StopReason
from tasks.heads import register_profile
from tasks.publish import Publication, Publisher
from tasks.settings import TaskSettings
from tests.bookkeeping import PROFILE
from tests.browser import running_browser
from tests.integration.fake_engine import AUTHKEY, HEAD, MODEL, FakeEngine, outcome_of
from tests.redis_server import running_redis
from workers.head.channel import private_address
from workers.head.fronts import Fronts
from workers.settings import HeadSettings

#: ids as long as real ones are
BATCH = "batch_77192b3e2f0c1a2b"
WHY = "no memory left for the job"
SECRET = "words that only head and tail may read"
#: custom_id → the state and the beginning of the result that Flower has to show
EXPECTED = {
    "runs": ("STARTED", "tps=31.2 tokens=150"),
    "ends": ("SUCCESS", "tps=31.46 tokens=2 stop"),
    "cancelled": ("REVOKED", "tps=31.46 tokens=2 cancelled"),
    "returns": ("RETRY", "waits in the queue again"),
    "fails": ("FAILURE", "out_of_memory: no memory le…"),
}


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


@dataclass
class Dashboard:
    """A Flower process under `/flower`, and all that was said on the queue server's channels."""

    port: int
    heard: list[str] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/flower{path}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url(path), timeout=10) as reply:
            text: str = reply.read().decode()
        return text

    def jobs(self) -> dict[str, dict[str, Any]]:
        """The rows of the list of jobs by custom_id."""
        rows = json.loads(self.get("/tasks/datatable?draw=1&start=0&length=50&order[0][column]=0"))["data"]
        return {row["args"].split("-")[0]: row for row in rows if row["args"]}

    def shows(self, expected: dict[str, tuple[str, str]]) -> bool:
        jobs = self.jobs()
        return len(jobs) == len(EXPECTED) and all(
            jobs[name]["state"] == state and str(jobs[name]["result"]).startswith(result)
            for name, (state, result) in expected.items()
        )


def job(name: str) -> str:
    return f"{BATCH}-{101 + list(EXPECTED).index(name)}"


def task(name: str) -> GenerationTask:
    return GenerationTask(job(name), 0, BATCH, f"{name}-of-document-17", MODEL, GenerationRequest(SECRET, None, seed=1))


@contextmanager
def fronts_of(url: str) -> Iterator[FakeEngine]:
    with private_address() as address:
        engine = FakeEngine(address, delay_s=None)
        settings = HeadSettings(model="/models/any", broker_url=url, head_id=HEAD)
        fronts = Fronts(settings, address, AUTHKEY, model=MODEL, count=2, concurrency_total=8, grace_s=0.1)
        try:
            wait_until(lambda: engine.server.num_fronts == 2)
            yield engine
        finally:
            fronts.close()
            engine.close()


def report(engine: FakeEngine) -> bool:
    """As an engine does round after round; a front passes on one report in two seconds."""
    for name in EXPECTED:
        engine.server.progress(f"{job(name)}.0", 150, 31.2)
    return True


def end_jobs(engine: FakeEngine) -> None:
    """One succeeds, one is cancelled, one fails, one goes back to the queue; another runs on."""
    now = time.time()
    cancelled = replace(outcome_of(task("cancelled"), now), finish_reason=None, stopped=StopReason.CANCELLED)
    failed = replace(outcome_of(task("fails"), now), finish_reason=None, failure=FailureType.OUT_OF_MEMORY)
    engine.server.finish(f"{job('ends')}.0", outcome_of(task("ends"), now))
    engine.server.finish(f"{job('cancelled')}.0", cancelled)
    engine.server.finish(f"{job('fails')}.0", replace(failed, failure_message=WHY))
    engine.server.set_consuming(False)
    engine.server.hand_back(f"{job('returns')}.0")


def said_in(message: str) -> str:
    """An event as Celery sends it, readable."""
    content = json.loads(message)
    return message + base64.b64decode(content["body"]).decode() if isinstance(content, dict) else message


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    with ExitStack() as cleanup:
        server = cleanup.enter_context(running_redis(tmp_path_factory.mktemp("flower")))
        with socket.create_server(("127.0.0.1", 0)) as free:
            it = Dashboard(free.getsockname()[1])
        client = cleanup.enter_context(redis.Redis.from_url(server.url, protocol=2, decode_responses=True))
        processes = Processes(lambda name, line: None)
        arguments = ("--port", str(it.port), "--url-prefix", "/flower/", "--max-tasks", "50")
        processes.start("flower", shardq_argv("flower", *arguments), {"SHARDQ_BROKER_URL": server.url})
        cleanup.callback(processes.stop, ("flower",))
        # fronts subscribe to channels, too: what they send before Flower listens is lost to it
        wait_until(client.pubsub_numpat)
        engine = cleanup.enter_context(fronts_of(server.url))
        channels = cleanup.enter_context(client.pubsub())
        channels.psubscribe("*")
        client.set(keys.head(HEAD), "alive")
        register_profile(client, MODEL, PROFILE)
        with Publisher(TaskSettings(broker_url=server.url)) as publisher:
            publisher.publish(Publication(task(name)) for name in EXPECTED)
        engine.server.set_consuming(True)
        wait_until(lambda: len(engine.server.live()) == len(EXPECTED))
        wait_until(lambda: report(engine) and it.shows(dict.fromkeys(EXPECTED, EXPECTED["runs"])))
        end_jobs(engine)
        wait_until(lambda: it.shows(EXPECTED))
        while message := channels.get_message(timeout=0.1):
            it.heard.append(said_in(str(message["data"])))
        yield it


def test_the_page_shows_a_running_jobs_rate_and_a_finished_jobs_result(dashboard: Dashboard) -> None:
    with running_browser() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 540})
        page.goto(dashboard.url("/tasks"))
        page.wait_for_selector("td:has-text('tps=31.2 tokens=150')", timeout=10_000)
        if path := os.environ.get("SHARDQ_SCREENSHOT"):
            page.screenshot(path=path)
        rows = {name: page.locator("tr", has_text=f"{name}-of-document-17 {MODEL}").inner_text() for name in EXPECTED}
        edges = page.locator("#tasks-table th, #tasks-table td, .dataTables_scrollHead th").evaluate_all(
            "cells => cells.map(cell => [cell.innerText, cell.getBoundingClientRect().right, "
            "cell.scrollWidth - cell.clientWidth])"
        )
    assert not [cell for cell in edges if cell[1] > 1280 or cell[2] > 1], "columns that are hidden or cut"
    for name, (state, result) in EXPECTED.items():
        assert state in rows[name]
        assert result in rows[name]
    assert SECRET not in "".join(rows.values())


def test_a_failed_job_says_why(dashboard: Dashboard) -> None:
    assert dashboard.jobs()["fails"]["exception"] == f"out_of_memory: {WHY}"
    assert f"out_of_memory: {WHY}" in dashboard.get(f"/task/{job('fails')}.0")


def test_no_prompt_and_no_text_is_in_any_event_or_page(dashboard: Dashboard) -> None:
    pages = [dashboard.get(f"/task/{job(name)}.0") for name in EXPECTED]
    assert any("task-succeeded" in said and f"{job('ends')}.0" in said for said in dashboard.heard)
    assert all(f"{name}-of-document-17 {MODEL}" in page for name, page in zip(EXPECTED, pages, strict=True))
    assert not [said for said in [*dashboard.heard, *pages] if SECRET in said or "text of job" in said]


def test_the_queue_of_every_served_name_is_counted(dashboard: Dashboard) -> None:
    cells = re.findall(r"<td[^>]*>\s*([^<\s]+)\s*</td>", dashboard.get("/broker"))
    # the one that was handed back; nothing waits for a newer head
    assert dict(zip(cells[::2], cells[1::2], strict=True)) == {keys.queue(MODEL): "1", keys.queue(MODEL, 2): "0"}


def test_a_head_is_one_worker_whose_page_lists_its_jobs(dashboard: Dashboard) -> None:
    listed = json.loads(dashboard.get("/workers?json=1"))["data"]
    assert [(worker["hostname"], worker["status"], worker["task-failed"]) for worker in listed] == [(HEAD, True, 1)]
    assert {job["worker"] for job in dashboard.jobs().values()} == {HEAD}
    with running_browser() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 540})
        page.goto(dashboard.url("/workers"))
        page.get_by_role("link", name=f"Worker {HEAD}").click()
        page.wait_for_selector("td:has-text('out_of_memory')", timeout=10_000)
        assert page.url == dashboard.url(f"/tasks?worker={HEAD}")
        assert page.locator("#tasks-table tbody tr").count() == len(EXPECTED)
        page.get_by_role("link", name=f"{job('fails')}.0").first.click()
        page.get_by_role("link", name=HEAD, exact=True).click()
        page.wait_for_url(dashboard.url(f"/tasks?worker={HEAD}"))


@pytest.mark.parametrize(
    "path",
    [
        *("/api/worker/shutdown/x", "/api/worker/pool/grow/x", "/api/worker/queue/add-consumer/x"),
        *("/api/task/revoke/job-runs.0", "/api/task/abort/job-runs.0", "/api/task/send-task/shardq.generate"),
        *("/api/task/apply/shardq.generate", "/api/task/rate-limit/x", "/api/task/timeout/x"),
    ],
)
def test_nothing_can_be_controlled_from_the_page(dashboard: Dashboard, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(dashboard.url(path), data=b"", timeout=10)
    assert refused.value.code == 404
    refused.value.close()
