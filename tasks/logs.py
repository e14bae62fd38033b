"""Log lines of every process: for people on a terminal, JSON objects everywhere else (`docs/logs.md`).

Modules log through `logging.getLogger(__name__)`; a record about a job says so with `extra={"job": …}`, or
with `extra={"task": <job>.<attempt>}`. What Celery, kombu and redis-py log takes the same way. No line holds a
password, whoever wrote it.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

import structlog
from structlog.dev import Column, ConsoleRenderer, KeyValueColumnFormatter, LogLevelColumnFormatter, plain_traceback
from structlog.typing import EventDict, Processor

from tasks.json_text import json_text
from tasks.settings import LogFormat, LogSettings

#: what a record may carry beside its text; libraries put arguments of tasks, which hold prompts, into others
FIELDS = ("job", "batch", "attempt", "head", "state")
#: what stands in the place of a password
REDACTED = "***"
#: characters of the shortest password that is looked for by itself; a shorter one is found in addresses only
MIN_SECRET = 6

#: loggers of libraries → the lowest level that is shown of them
_QUIET = {
    "amqp": logging.WARNING,
    "celery": logging.WARNING,
    "filelock": logging.WARNING,
    "httpx": logging.WARNING,
    "huggingface_hub": logging.WARNING,
    "kombu": logging.WARNING,
    "urllib3": logging.WARNING,
    # both warn of every message that is handed back
    "celery.app.trace": logging.ERROR,
    "kombu.transport.virtual.base": logging.ERROR,
}
#: from the first colon behind the scheme to the last @ of the word: a password may hold anything but blanks
_PASSWORD_IN_URL = re.compile(r"""(\b[A-Za-z][A-Za-z0-9+.-]*://[^\s:@/"']*:)[^\s"']+(?=@)""")
_SECRET_NAME = re.compile(r"SHARDQ_\w*(PASSWORD|SECRET|TOKEN|AUTHKEY)")

_root = logging.getLogger()
log = logging.getLogger(__name__)


def configure(level: str, *, process: str, colour: bool | None = None, stream: TextIO | None = None) -> None:
    """Send every record of this process to `stream` (stderr), from `level` on, under the name `process`.

    `colour`: None colours a terminal unless NO_COLOR is set. Warnings and exceptions that nobody catches become
    records, too. May be called again. Raises pydantic's ValidationError for a bad SHARDQ_LOG_FORMAT.
    """
    out = stream or sys.stderr
    is_human = _is_human(LogSettings().log_format, out)
    coloured = (out.isatty() and not os.environ.get("NO_COLOR")) if colour is None else colour
    if not is_human and isinstance(out, io.TextIOWrapper):
        # for programs: the same bytes under every locale
        out.reconfigure(encoding="utf-8", errors="backslashreplace")
    handler = _Handler(out)
    handler.setFormatter(_formatter(process, is_human, coloured))
    for other in list(_root.handlers):
        if type(other) in (logging.StreamHandler, _Handler):
            _root.removeHandler(other)
    _root.addHandler(handler)
    _root.setLevel(level.upper())
    for name, lowest in _QUIET.items():
        logging.getLogger(name).setLevel(max(lowest, _root.level))
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def level_name() -> str:
    """The level this process logs from, for a child that shall do the same."""
    return logging.getLevelName(_root.getEffectiveLevel())


def redact(text: str, secrets: tuple[str, ...] = ()) -> str:
    """`text` without the passwords in its addresses, and without `secrets` wherever they stand."""
    if "://" in text:
        text = _PASSWORD_IN_URL.sub(rf"\1{REDACTED}", text)
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text


def secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The passwords in our variables of this environment, as written and with their escapes undone."""
    from urllib.parse import unquote

    found: set[str] = set()
    for name, value in environment.items():
        if not name.startswith("SHARDQ_"):
            continue
        if _SECRET_NAME.fullmatch(name):
            found.add(value)
        elif "://" in value and "@" in value:
            # no parser: it would stumble over, or cut, a password with an unescaped `/`, `#`, `[` or `@`
            place = value.partition("://")[2]
            for account in (place.partition("@")[0], place.rpartition("@")[0]):
                password = account.partition(":")[2]
                found |= {password, unquote(password)}
    return tuple(sorted((secret for secret in found if len(secret) >= MIN_SECRET), key=len, reverse=True))


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, to be told from others."""


class _Redactor:
    """The last to see a record before it becomes a line."""

    def __init__(self) -> None:
        #: None until the first record: options may still be on their way into the environment
        self._secrets: tuple[str, ...] | None = None

    def __call__(self, _: Any, __: str, event: EventDict) -> EventDict:
        if self._secrets is None:
            self._secrets = secrets_of(os.environ)
        for name, value in event.items():
            if isinstance(value, str):
                event[name] = redact(value, self._secrets)
        return event


def _is_human(form: LogFormat, out: TextIO) -> bool:
    return out.isatty() if form is LogFormat.AUTO else form is LogFormat.HUMAN


def _formatter(process: str, is_human: bool, coloured: bool) -> logging.Formatter:
    def describe(_: Any, __: str, event: EventDict) -> EventDict:
        """The fields of a record, in the order in which they are shown."""
        record: logging.LogRecord = event["_record"]
        known = {
            "time": _clock(record.created) if is_human else _timestamp(record.created),
            "level": record.levelname.lower(),
            "process": process,
            "event": event["event"],
            **_fields(record.__dict__),
        }
        return {**known, **event}

    renderer: Processor = _console(coloured) if is_human else structlog.processors.JSONRenderer(serializer=_to_json)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[describe],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _Redactor(),
            renderer,
        ],
    )


def _fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the record says beside its text."""
    fields = {name: record[name] for name in FIELDS if name in record}
    data = record.get("data")
    # Celery's own records of a task carry its id so.
    task = record.get("task") or (data.get("id") if isinstance(data, dict) else None)
    if isinstance(task, str) and "job" not in fields:
        job, _, attempt = task.rpartition(".")
        if job and attempt.isdecimal():
            fields |= {"job": job, "attempt": int(attempt)}
    return fields


def _timestamp(created: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    return f"{whole}.{int(created % 1 * 1000):03d}Z"


def _clock(created: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(created))


def _to_json(event: dict[str, Any], **_: Any) -> str:
    return json_text(event, default=str)


def _console(coloured: bool) -> ConsoleRenderer:
    reset, dim, bold, cyan = ("\x1b[0m", "\x1b[2m", "\x1b[1m", "\x1b[36m") if coloured else ("", "", "", "")
    levels = ConsoleRenderer.get_default_level_styles(coloured)

    def plain(style: str, width: int = 0) -> KeyValueColumnFormatter:
        return KeyValueColumnFormatter(None, style, reset, str, width=width)

    return ConsoleRenderer(
        columns=[
            Column("", KeyValueColumnFormatter(dim, cyan, reset, str)),
            Column("time", plain(dim)),
            Column("level", LogLevelColumnFormatter(levels, reset)),
            Column("process", plain(cyan)),
            Column("event", plain(bold if coloured else "")),
        ],
        exception_formatter=plain_traceback,
    )


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    log.critical("nobody caught %s", kind.__name__, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_type is SystemExit or arguments.exc_value is None:
        return
    name = arguments.thread.name if arguments.thread else "a thread"
    trace = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
    log.critical("nobody caught %s in %s", arguments.exc_type.__name__, name, exc_info=trace)
