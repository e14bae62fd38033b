"""Why nothing moves: every reason is found on a real server and names the next step."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from click.testing import Result

from cli.errors import ExitCode
from relay.messages import FRAME_VERSION
from relay.streams import RedisRelay
from relay.transport import TailInfo
from storage.stops import cancel_batch
from tasks import generation, heads, keys
from tests.bookkeeping import head_info
from tests.cli_runner import PROFILE, PROMPTS, Shardq

MODEL = "tiny"


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connected:
        heads.register_profile(connected, MODEL, PROFILE)
        connected.set(keys.BOOKKEEPER, "somebody")
        heads.say_host(connected)
        yield connected
        connected.config_set("maxmemory", 0)


@pytest.fixture
def run(tmp_path: Path, redis_url: str, client: redis.Redis) -> Shardq:
    return Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url})


@pytest.fixture
def batch(run: Shardq) -> str:
    return run.submit()


def live(client: redis.Redis, **values: object) -> None:
    """A head that takes jobs of `MODEL`, but for `values`."""
    heads.beat(client, replace(head_info(), **{"model": MODEL, "consuming": True, "running": 0, "slots": 2, **values}))  # type: ignore[arg-type]


def warned(run: Shardq, batch: str) -> str:
    """The one warning of `status BATCH`; `status` says the same, and `--json` has it."""
    result = run("status", batch)
    assert result.exit_code == ExitCode.UNFINISHED
    (warning,) = [line for line in result.stderr.splitlines() if line.startswith("Warning: ")] or [""]
    reason = _without_figures(warning.removeprefix("Warning: "))
    obstacles = [_without_figures(obstacle) for obstacle in run.status(batch)["obstacles"]]
    assert obstacles == ([reason] if reason else [])
    assert reason in _without_figures(run("status").stderr)
    return reason


def _without_figures(text: str) -> str:
    """A server's memory moves from look to look."""
    return re.sub(r"[0-9]+%", "…%", text)


def test_nothing_is_said_where_all_is_well(run: Shardq, client: redis.Redis, batch: str) -> None:
    live(client)
    assert warned(run, batch) == ""


def test_no_bookkeeper_runs(run: Shardq, client: redis.Redis, batch: str) -> None:
    live(client)
    client.delete(keys.BOOKKEEPER)
    assert "start `shardq bookkeeper`" in warned(run, batch)


def test_no_head_is_alive(run: Shardq, batch: str) -> None:
    assert "no head is alive" in warned(run, batch)


def test_no_head_serves_this_model(run: Shardq, client: redis.Redis, batch: str) -> None:
    live(client, model="other")
    assert "no head serves 'tiny', only other (start `shardq head --name tiny`)" in warned(run, batch)


def test_a_head_has_no_tail(run: Shardq, client: redis.Redis, batch: str) -> None:
    live(client, consuming=False)
    live(client, head_id="h2", model="other")  # which takes jobs, but not these
    assert "no head has a tail (h1)" in warned(run, batch)


def test_a_head_says_what_keeps_it_from_its_tail(run: Shardq, client: redis.Redis, batch: str) -> None:
    obstacle = "tail t-1 and head h1 differ: split: 12 ≠ 14 (give both the same --split)"
    live(client, consuming=False, obstacle=obstacle)
    live(client, head_id="h2", model="other")
    assert warned(run, batch) == f"head h1 takes no jobs: {obstacle}"
    live(client, head_id="h3")  # jobs move, and one head stands still all the same
    assert warned(run, batch) == ""
    assert obstacle in run("status").stderr
    assert obstacle in json.loads(run("status", "--json").stdout)["obstacles"][0]
    assert f"but takes no jobs: {obstacle}" in told(run("doctor"))
    assert json.loads(run("top", "--once", "--json").stdout)["obstacles"] == [f"head h1 takes no jobs: {obstacle}"]
    assert obstacle in told(run("top", "--once"))


def told(result: Result) -> str:
    """What a command printed, however it broke its lines."""
    return " ".join(result.output.split())


@pytest.fixture
def tail(redis_url: str) -> Iterator[Callable[[int], None]]:
    """Announces a tail with frames of a version, on the same server."""
    with closing(RedisRelay(redis_url)) as relay, ExitStack() as cleanup:

        def announce(frames: int) -> None:
            info = TailInfo("t-00000001", PROFILE, 12, 2, 64, time.time(), frames=frames)
            cleanup.enter_context(closing(relay.announce(info)))

        yield announce


def test_a_head_that_does_not_say_its_obstacle_is_found_to_speak_other_frames_than_the_tail(
    run: Shardq, client: redis.Redis, redis_url: str, tail: Callable[[int], None]
) -> None:
    live(client, consuming=False)
    tail(FRAME_VERSION + 1)
    place = {"SHARDQ_RELAY_URL": redis_url}
    reason = (
        f"head h1 takes no jobs: tail t-00000001 speaks frames of version {FRAME_VERSION + 1}, the head of version "
        f"{FRAME_VERSION} (upgrade the head)"
    )
    assert reason in run("status", **place).stderr
    assert f"t-00000001, layers from 12, up to 2 slots, but {reason}" in told(run("doctor", **place))


def test_tasks_that_no_head_reads_are_counted_with_what_each_head_reads(
    run: Shardq, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(generation.SINCE, "min_tokens", 2)
    client.delete(keys.BOOKKEEPER)
    batch = run.submit(PROMPTS, "--min-tokens", "1")
    client.set(keys.BOOKKEEPER, "somebody")
    live(client)
    live(client, head_id="h2")
    reason = (
        "waiting for a head that reads version 2 of the tasks: 2 jobs of tiny; head h1 reads up to 1, "
        "head h2 reads up to 1 (upgrade a head)"
    )
    assert warned(run, batch) == reason
    assert reason in told(run("doctor"))
    assert json.loads(run("top", "--once", "--json").stdout)["obstacles"] == [reason]
    live(client, head_id="h2", knows=2)
    mend = "h2 may not take them: `shardq server update` on the host, then start it again"
    assert warned(run, batch) == reason.replace("upgrade a head", mend)
    live(client, head_id="h2", reads=2, knows=2)
    assert warned(run, batch) == ""


def test_all_slots_are_busy(run: Shardq, client: redis.Redis, batch: str) -> None:
    live(client, running=2)
    assert "all 2 slots are busy" in warned(run, batch)
    run.start_jobs(batch, "a")
    assert warned(run, batch) == ""


@pytest.mark.parametrize(("share", "words"), [(0.8, "feeding pauses"), (0.99, "nothing more can be queued")])
def test_the_queue_server_is_full(run: Shardq, client: redis.Redis, share: float, words: str) -> None:
    live(client)
    limit = int(client.info("memory")["used_memory"] / share)  # type: ignore[index]
    client.config_set("maxmemory", limit)
    batch = run.submit()  # the first pass of feeding finds no room
    assert words in warned(run, batch)
    assert "maxmemory" in warned(run, batch)


def test_the_queue_server_does_not_answer(run: Shardq, batch: str) -> None:
    result = run("status", batch, SHARDQ_BROKER_URL="redis://127.0.0.1:1/0")
    assert "does not answer" in result.stderr
    assert "nothing listens there: look at SHARDQ_BROKER_URL" in result.stderr


def test_a_batch_that_is_being_stopped_needs_no_head(run: Shardq, batch: str) -> None:
    run.start_jobs(batch, "a")
    with run.database() as database:
        cancel_batch(database, batch)
    assert warned(run, batch) == ""
