"""Log lines: one shape in every process, one id per job, and no password whoever wrote the record."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery.utils.log import get_logger, get_task_logger
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.logs import REDACTED, configure, level_name, redact, secrets_of

log = logging.getLogger("workers.somewhere")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test configures ends with it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.delenv("SHARDQ_LOG_FORMAT", raising=False)
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def configured(level: str = "info", **options: Any) -> io.StringIO:
    out = io.StringIO()
    configure(level, process="head", stream=out, **options)
    return out


def records(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_record_is_one_json_object_with_the_same_fields_everywhere() -> None:
    out = configured()
    log.info("taking %s", "jobs")
    (record,) = records(out)
    assert list(record) == ["time", "level", "process", "event"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record["time"])
    assert (record["level"], record["process"], record["event"]) == ("info", "head", "taking jobs")


def test_a_record_about_a_job_carries_its_id_however_it_was_named() -> None:
    out = configured()
    log.info("by job", extra={"job": "batch_1-7"})
    log.info("by task", extra={"task": "batch_1-7.2"})
    get_logger("celery.app.trace").error("by celery", extra={"data": {"id": "batch_1-7.3", "args": "a prompt"}})
    log.info("by none", extra={"task": "something else"})
    assert [record.get("job") for record in records(out)] == ["batch_1-7"] * 3 + [None]
    assert [record.get("attempt") for record in records(out)] == [None, 2, 3, None]


def test_what_libraries_attach_to_records_stays_out() -> None:
    out = configured()
    log.warning("with more", extra={"prompt": "private", "data": {"args": ["private"]}})
    assert "private" not in out.getvalue()


def test_celery_kombu_and_redis_log_the_same_way() -> None:
    out = configured()
    get_task_logger("tasks.generate").warning("one")
    get_logger("celery.worker.consumer").warning("two")
    logging.getLogger("kombu.connection").error("three")
    logging.getLogger("redis.client").warning("four")
    assert [record["event"] for record in records(out)] == ["one", "two", "three", "four"]


def test_libraries_are_heard_from_warnings_on() -> None:
    out = configured("debug")
    get_logger("celery.worker.strategy").info("Task received")
    get_logger("celery.app.trace").warning("handed back")
    log.debug("ours")
    assert [record["event"] for record in records(out)] == ["ours"]
    assert level_name() == "DEBUG"


def test_a_terminal_gets_lines_for_people() -> None:
    out = Terminal()
    configure("info", process="head", stream=out, colour=False)
    log.info("taking jobs", extra={"job": "batch_1-7"})
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[info +\] head taking jobs job=batch_1-7\n", out.getvalue())


def test_colours_are_for_terminals_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = Terminal()
    configure("info", process="head", stream=coloured)
    log.info("one")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    configure("info", process="head", stream=plain)
    log.info("two")
    assert "\x1b[" in coloured.getvalue()
    assert "\x1b[" not in plain.getvalue()
    assert "two" not in coloured.getvalue()


def test_the_format_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDQ_LOG_FORMAT", "human")
    people = configured()
    log.info("for people")
    monkeypatch.setenv("SHARDQ_LOG_FORMAT", "json")
    machines = Terminal()
    configure("info", process="head", stream=machines)
    log.info("for machines")
    assert people.getvalue().endswith("head for people\n")
    assert json.loads(machines.getvalue())["event"] == "for machines"
    monkeypatch.setenv("SHARDQ_LOG_FORMAT", "xml")
    with pytest.raises(ValidationError):
        configured()


def test_an_exception_is_part_of_its_record() -> None:
    out = configured()
    try:
        raise KeyError("lost")
    except KeyError:
        log.exception("it broke")
    (record,) = records(out)
    assert record["event"] == "it broke"
    assert record["exception"].endswith("KeyError: 'lost'")


def test_what_nobody_catches_is_a_record_too() -> None:
    out = configured()
    thread = threading.Thread(target=lambda: 1 // 0, name="beat")
    thread.start()
    thread.join()
    sys.excepthook(ValueError, ValueError("redis://:opensesame@host"), None)
    first, second = records(out)
    assert first["event"] == "nobody caught ZeroDivisionError in beat"
    assert "ZeroDivisionError" in first["exception"]
    assert second["level"] == "critical"
    assert "opensesame" not in out.getvalue()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:secret@host:6379/0", "redis://user:***@host:6379/0"),
        ("rediss://:p@ss/w:rd?#@host/1", "rediss://:***@host/1"),
        ("postgresql+psycopg://me:x@h/db, redis://:y@h", "postgresql+psycopg://me:***@h/db, redis://:***@h"),
        ("see http://127.0.0.1:5555/tasks", "see http://127.0.0.1:5555/tasks"),
        ("redis://user@host", "redis://user@host"),
        ("nothing here", "nothing here"),
    ],
)
def test_a_password_in_an_address_is_never_shown(text: str, shown: str) -> None:
    assert redact(text) == shown


@given(st.text(st.characters(blacklist_categories=["Z", "C"], blacklist_characters="'\""), min_size=1, max_size=30))
def test_whatever_a_password_is_made_of_it_is_not_shown_in_an_address(password: str) -> None:
    assert redact(f"to redis://user:{password}@host:1/0 now") == f"to redis://user:{REDACTED}@host:1/0 now"


def test_a_password_of_our_variables_is_found_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDQ_BROKER_URL", "rediss://bookkeeper:open%2Fsesame@host:6379/0")
    monkeypatch.setenv("SHARDQ_FRONT_AUTHKEY", "00ff00ff")
    out = configured()
    log.warning("AUTH open/sesame failed", extra={"job": "open/sesame-1"})
    try:
        raise RuntimeError("key 00ff00ff, password open%2Fsesame")
    except RuntimeError:
        log.exception("no")
    assert "sesame" not in out.getvalue()
    assert "00ff00ff" not in out.getvalue()
    assert out.getvalue().count(REDACTED) >= 4


def test_a_short_password_does_not_blot_out_other_words() -> None:
    assert secrets_of({"SHARDQ_BROKER_URL": "redis://:a@h", "OTHER": "redis://:long-enough@h"}) == ()


def test_text_that_no_encoding_takes_does_not_break_a_line() -> None:
    code = (
        "import logging; from tasks.logs import configure; configure('info', process='p');"
        r"logging.getLogger('x').warning('half \ud800 and\nlines é', extra={'job': 'j\ud800'})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(result.stderr) == {**json.loads(result.stderr), "event": "half \ud800 and\nlines é"}
    assert len(result.stderr.splitlines()) == 1


def test_no_text_ends_a_line_and_no_locale_changes_one() -> None:
    code = (
        "import logging; from tasks.logs import configure; configure('info', process='p');"
        r"logging.getLogger('x').warning('a\u2028b\u2029c\x85d “e”')"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1:strict"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True, timeout=60)
    (line,) = result.stderr.decode().splitlines()
    assert json.loads(line)["event"] == "a\u2028b\u2029c\x85d “e”"
