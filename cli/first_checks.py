"""What can be known to be wrong before torch is imported, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from cli.errors import NotFound
from relay.streams import RedisRelay
from tasks.connection import connect, ping
from tasks.settings import TaskSettings
from workers.gpus import check_device
from workers.settings import HeadSettings, TailSettings, WorkerSettings


def check_head(settings: HeadSettings) -> None:
    """Raise a CliError, TaskError, RelayError or WorkerError if a head with these settings cannot start."""
    check_devices(settings)
    check_model_path(settings.model)
    if settings.drafter_model:
        check_model_path(settings.drafter_model)
    _check_queue(settings)
    if not settings.whole:
        _check_wire(settings)


def check_tail(settings: TailSettings) -> None:
    """Raise a CliError, RelayError or WorkerError if a tail with these settings cannot start."""
    check_device(settings.device)
    check_model_path(settings.model)
    _check_wire(settings)


def check_devices(settings: HeadSettings) -> None:
    """Raise DeviceUnavailable if the head's half or its drafter cannot be where the settings say."""
    check_device(settings.device)
    check_device(settings.draft_device)


def check_model_path(model: str) -> None:
    """Raise NotFound for a path that does not exist; anything else may be a hub id."""
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().exists():
        raise NotFound(
            f"model {model} does not exist: name a directory, a GGUF file, or a repository as Qwen/Qwen2.5-7B-Instruct"
        )


def _check_queue(settings: HeadSettings) -> None:
    client = connect(TaskSettings(broker_url=settings.broker_url, allow_insecure=settings.allow_insecure))
    try:
        ping(client)
    finally:
        client.close()


def _check_wire(settings: WorkerSettings) -> None:
    relay = RedisRelay(settings.relay_url, allow_insecure=settings.allow_insecure)
    try:
        relay.ping()
    finally:
        relay.close()
