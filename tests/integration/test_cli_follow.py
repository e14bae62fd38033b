"""`shardq follow`, with heads that tell what they are told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis

from cli.errors import ExitCode
from cli.live_text import LiveText
from storage.batch_records import NewBatch
from storage.batches import add_jobs, begin_submission
from storage.job_records import JobRow, NewJob
from storage.jobs import get_job
from storage.states import JobState
from tasks import following, heads, keys
from tasks.following import Increment
from tests.cli_runner import PROFILE, Shardq, error_of
from workers.head.following import FollowWatch
from workers.head.shown import ShownTexts

#: what `end_jobs` records
TEXT = "Größe,\nzwei"


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connected:
        heads.register_profile(connected, "tiny", PROFILE)
        yield connected


@pytest.fixture
def run(tmp_path: Path, redis_url: str, client: redis.Redis) -> Shardq:
    return Shardq(tmp_path / "data", {"SHARDQ_BROKER_URL": redis_url})


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join(timeout=10)


class Head:
    """The publishing half of a head; `say` commits a text of one task."""

    def __init__(self, client: redis.Redis, task_id: str) -> None:
        self.shown = ShownTexts()
        self.task_id = task_id
        self.woken = threading.Event()
        self.watch = FollowWatch(client, lambda: (task_id,), self.shown, self.woken.set, look_s=0.01)

    def say(self, text: str, choice: int = 0) -> None:
        if self.shown.wants(self.task_id):
            self.shown.show(self.task_id, choice, text)

    def close(self) -> None:
        self.watch.close()


def follow(run: Shardq, client: redis.Redis, job: JobRow, write: Callable[[str], None]) -> JobRow:
    with run.database() as database:
        return LiveText(database, client, job, 0, write, lambda _: None).to_the_end()


def test_nothing_is_published_of_a_job_that_nobody_follows(client: redis.Redis) -> None:
    with closing(Head(client, "b-1.1")) as head:
        time.sleep(0.05)
        head.say("unheard")
        time.sleep(0.05)
        assert client.exists(keys.followed_text("b-1.1")) == 0
        following.follow(client, "b-1.1")
        wait_until(head.woken.is_set)
        assert list(head.shown.asked()) == ["b-1.1"]
        head.say("one")
        wait_until(lambda: following.told(client, "b-1.1", "0"))
        head.say("one two")
        wait_until(lambda: len(following.told(client, "b-1.1", "0")) == 2)
        assert [said for _, said in following.told(client, "b-1.1", "0")] == [
            Increment(0, 0, "one"),
            Increment(0, 3, " two"),
        ]
        head.woken.clear()
        following.follow(client, "b-1.1")  # a second follower gets the whole text
        wait_until(head.woken.is_set)
        head.say("one two")
        wait_until(lambda: [said.text for _, said in following.told(client, "b-1.1", "0")] == ["one two"])
        assert 0 < client.ttl(keys.followed_text("b-1.1")) <= following.KEPT_S
        client.delete(keys.follow("b-1.1"))
        wait_until(lambda: not head.shown.wants("b-1.1"))


def test_every_character_comes_once_whatever_heads_repeat_or_drop(run: Shardq, client: redis.Redis) -> None:
    batch = run.submit()
    run.start_jobs(batch, "a")
    job = run.jobs(batch)["a"]
    task_id, pieces = f"{job.id}.{job.attempt}", []
    said = [(0, "Gr"), (2, "öß"), (0, "Gr"), (0, "Größe"), (7, "behind a gap")]

    def tell() -> None:
        wait_until(lambda: client.exists(keys.follow(task_id)))
        wish = client.get(keys.follow(task_id))
        following.publish(client, task_id, [Increment(0, *piece) for piece in said], anew=False)
        following.publish(client, task_id, [Increment(1, 0, "another choice")], anew=False)
        wait_until(lambda: client.get(keys.follow(task_id)) != wish)  # asked for the whole text once more
        following.publish(client, task_id, [Increment(0, 0, "Größe,\nz")], anew=True)
        wait_until(lambda: "".join(pieces) == "Größe,\nz")
        run.end_jobs(batch)

    with meanwhile(tell):
        assert follow(run, client, job, pieces.append).state == JobState.COMPLETED
    assert pieces == ["Gr", "öß", "e", ",\nz"]


def test_a_job_that_has_ended_prints_its_stored_text(run: Shardq) -> None:
    batch = run.submit()
    run.end_jobs(batch, b=JobState.FAILED)
    done = run("follow", f"{batch}-1")
    assert (done.exit_code, done.stdout, done.stderr) == (ExitCode.OK, f"{TEXT}\n", "")
    lines = [json.loads(line) for line in run("follow", f"{batch}-1", "--json").stdout.splitlines()]
    assert [line["object"] for line in lines] == ["job.text", "job.end"]
    assert (lines[0]["text"], lines[0]["position"], lines[1]["status"]) == (TEXT, 0, "completed")
    failed = run("follow", f"{batch}-2")
    assert (failed.exit_code, failed.stdout) == (ExitCode.JOBS_FAILED, "")
    assert "too long (correct its line, then submit it again)" in failed.stderr
    assert "--choice is at most 0" in error_of(run("follow", f"{batch}-1", "--choice", "1"))


def test_the_way_to_run_a_stopped_job_again_is_one_that_does_so(run: Shardq) -> None:
    batch = run.submit()
    run.end_jobs(batch, a=JobState.CANCELLED, b=JobState.EXPIRED)
    assert f"(`shardq retry {batch} --cancelled` runs it again)" in run("follow", f"{batch}-1").stderr
    assert f"(`shardq retry {batch}` runs it again)" in run("follow", f"{batch}-2").stderr
    assert json.loads(run("retry", batch, "--cancelled", "--json").stdout)["retried"] == 1


def test_a_batch_of_several_jobs_asks_for_one(run: Shardq) -> None:
    batch = run.submit()
    assert f"name one, as `shardq follow {batch}-1`" in error_of(run("follow", batch))


def test_a_job_of_a_submission_that_was_cut_off_says_so_and_how_to_go_on(run: Shardq, client: redis.Redis) -> None:
    with run.database() as database:
        submission = begin_submission(database, NewBatch("hash"))
        add_jobs(database, submission, [NewJob(1, "a", "tiny", "/v1/completions", "{}")])
    batch, said = submission.batch.id, []

    def say(reason: str) -> None:
        said.append(reason)
        run("cancel", batch)  # or it would wait for ever

    with run.database() as database:
        row = get_job(database, f"{batch}-1")
        assert LiveText(database, client, row, 0, lambda _: None, say).to_the_end().state == JobState.CANCELLED
    ways = f"its submission goes on or was cut off (submit it again, or `shardq delete {batch}`)"
    assert said == [f"{batch}-1 is not queued yet: {ways}"]


def test_a_waiting_job_waits_and_says_why(run: Shardq) -> None:
    batch = run.submit()
    ending = threading.Timer(1.5, run.end_jobs, [batch])
    ending.start()
    result = run("follow", f"{batch}-1")
    ending.join()
    assert (result.exit_code, result.stdout) == (ExitCode.OK, f"{TEXT}\n")
    assert "start `shardq bookkeeper`" in result.stderr
    assert "start `shardq head`" in result.stderr
