"""Record what an installation leaves behind, for the tests of upgrades: database, both servers' keys, rights, fields.

Run by the shardq that is to be upgraded from, in its checkout, before anything of the next version is changed:

    git worktree add ../before COMMIT && cd ../before && make .venv/.stamp
    PYTHONPATH=. .venv/bin/python ../shardq/scripts/record_state.py ../shardq/tests/integration/states/NAME

Real processes work on it: a batch that has ended in every way; one of which some jobs have ended, some outcomes wait to
be recorded, some jobs were under way when head and bookkeeper were killed, some wait in the queue and some in the
database. `tests/integration/test_upgrades.py` reads what comes out.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import redis

from relay.profile import Profile
from relay.tail_figures import TailFigures
from relay.transport import TailInfo
from tasks import acl as queue_acl
from tasks import keys, queues
from tasks.figures import HeadFigures
from tasks.generation import Choice, GenerationRequest, GenerationTask, Metrics, Outcome
from tasks.heads import HeadInfo
from tasks.logprobs import TokenLogprob
from tests.acceptance.system import System
from tests.models import tiny_model

#: tokens of the letters a to h, so that what a random model writes can be read
_BIAS = {str(token): 100 for token in range(64, 72)}
#: entries of a frame stream that are kept: the others are like them
_FRAMES_KEPT = 2
#: what is read by its fields, none of which may be unknown
_FORMS: tuple[Any, ...] = (
    *(GenerationTask, GenerationRequest, Outcome, Metrics, Choice, TokenLogprob, HeadInfo, HeadFigures, TailFigures),
    *(Profile, TailInfo),
)
#: both servers' keys that say something; the others are Celery's own
_KEPT = ("shardq", "_kombu.binding.shardq")


def main(directory: Path) -> None:
    """Let a system work, break it off, and write what it left."""
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as place, System(Path(place), tiny_model(Path(place) / "tiny")) as system:
        _work(system)
        with redis.Redis.from_url(system.queue.url) as queue, redis.Redis.from_url(system.wire.url) as wire:
            _write(directory / "queue.json", _keys(queue))
            _write(directory / "wire.json", _keys(wire))
        (directory / "database.sql").write_text(_own(_database(system.directory / "shardq.sqlite3")), encoding="utf-8")
    rules = {"head": queue_acl.for_head("gpu-a", "tiny"), "bookkeeper": queue_acl.for_bookkeeper()}
    _write(directory / "rules.json", {**rules, "client": queue_acl.for_client()})
    _write(directory / "fields.json", {kind.__name__: [field.name for field in fields(kind)] for kind in _FORMS})


def _work(system: System) -> None:
    system.start_bookkeeper()
    system.start_tail(tail_name="gpu-b", split=2)
    system.start_head("gpu-a", split=2, slots=2, draft_length=2)
    system.wait_consuming()
    done = system.submit(list(_ended_jobs()), "--name", "done", "--model", "tiny")
    system.wait_for(done)
    system.submit(list(_open_jobs(14)), "--name", "open", "--priority", "2")
    system.wait_until(lambda: _num_ended(system, "open") >= 1, "a job that has ended")
    system.kill("bookkeeper")
    with redis.Redis.from_url(system.queue.url) as queue:
        system.wait_until(lambda: queue.xlen(keys.RESULTS) >= 3, "outcomes that nobody records")
        _kill_with_fronts(system, "gpu-a")
        held = sorted(queues.unacked_ids(queue, "gpu-a"))
    system.shardq("cancel", held[0].rpartition(".")[0])
    windows = {"SHARDQ_WINDOW_MIN_JOBS": "1", "SHARDQ_WINDOW_PER_SLOT": "2"}
    system.start("submit", "submit", str(_file(system, 9)), "--name", "waiting", **windows).process.wait(60)


def _kill_with_fronts(system: System, head: str) -> None:
    """So that nobody hands back what its fronts hold: they die first, while it cannot start them again."""
    pid = system.pid(head)
    os.kill(pid, signal.SIGSTOP)
    children = Path(f"/proc/{pid}/task").glob("*/children")
    for child in {int(word) for file in children for word in file.read_text().split()}:
        os.kill(child, signal.SIGKILL)
    system.kill(head)


def _ended_jobs() -> Iterator[dict[str, Any]]:
    yield {"custom_id": "plain", "prompt": "one", "max_tokens": 6, "logit_bias": _BIAS}
    several = {"n": 2, "logprobs": 1, "seed": 7, "presence_penalty": 0.5, "stop": ["hh"], "min_tokens": 2}
    yield {"custom_id": "several", "prompt": "two", "max_tokens": 6, "logit_bias": _BIAS, **several}
    messages = [{"role": "user", "content": "three"}]
    yield {"custom_id": "chat", "messages": messages, "max_tokens": 6, "logit_bias": _BIAS, "temperature": 0}
    yield {"custom_id": "too-long", "prompt": "four " * 100, "max_tokens": 6}


def _open_jobs(number: int) -> Iterator[dict[str, Any]]:
    for line in range(number):
        yield {"custom_id": f"open-{line}", "prompt": f"job {line}", "max_tokens": 120, "logit_bias": _BIAS}


def _file(system: System, number: int) -> Path:
    path = system.directory / "waiting.jsonl"
    lines = ({"custom_id": f"waiting-{line}", "prompt": f"later {line}", "max_tokens": 4} for line in range(number))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def _num_ended(system: System, name: str) -> int:
    shown: dict[str, Any] = json.loads(system.shardq("status", name, "--json").stdout)
    return int(shown["request_counts"]["completed"])


def _database(path: Path) -> str:
    with sqlite3.connect(path) as connection:
        return "".join(f"{statement}\n" for statement in connection.iterdump())


def _keys(client: redis.Redis) -> dict[str, Any]:
    """Every key that is kept: its type and its value, as the command of its type gives it."""
    names = sorted(key.decode() for key in client.scan_iter(count=1000))
    return {name: _value(client, name) for name in names if name.startswith(_KEPT)}


def _value(client: Any, name: str) -> dict[str, Any]:
    kind = client.type(name).decode()
    values: dict[str, Callable[[], Any]] = {
        "string": lambda: client.get(name),
        "list": lambda: client.lrange(name, 0, -1),
        "hash": lambda: client.hgetall(name),
        "set": lambda: sorted(client.smembers(name)),
        "zset": lambda: client.zrange(name, 0, -1, withscores=True),
        "stream": lambda: client.xrange(name)[: None if name == keys.RESULTS else _FRAMES_KEPT],
    }
    return {"type": kind, "value": _plain(values[kind]())}


def _plain(value: Any) -> Any:
    """JSON for what the server says; bytes that are no text as `{"base64": …}`."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, Iterable) and not isinstance(value, str) else value


def _own(text: str) -> str:
    """Without the name of the machine on which it was made."""
    # not where its letters happen to stand in base64
    return re.sub(rf"(?<![\w+/]){re.escape(socket.gethostname())}(?![\w+/=])", "host", text)


def _write(path: Path, content: object) -> None:
    path.write_text(_own(json.dumps(content, indent=1, ensure_ascii=False)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
