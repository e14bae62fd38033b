"""Settings of everything that talks to the queue server; the only reader of this package's variables."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class LogFormat(StrEnum):
    """How log lines look."""

    #: as `HUMAN` on a terminal, as `JSON` elsewhere
    AUTO = "auto"
    HUMAN = "human"
    JSON = "json"


class LogSettings(BaseSettings):
    """How every process logs. The field is also the variable `SHARDQ_LOG_FORMAT`."""

    model_config = SettingsConfigDict(env_prefix="SHARDQ_", frozen=True, extra="ignore", env_ignore_empty=True)

    #: `human`, `json`, or `auto`: for people on a terminal, JSON elsewhere
    log_format: LogFormat = LogFormat.AUTO


class TaskSettings(BaseSettings):
    """Where the queue server is and who we are. Each field is also the variable `SHARDQ_<FIELD>`."""

    # The address may hold a password: it is kept out of reprs and error messages.
    model_config = SettingsConfigDict(
        env_prefix="SHARDQ_", frozen=True, extra="ignore", hide_input_in_errors=True, env_ignore_empty=True
    )

    #: broker, results stream and head presence
    broker_url: str = Field(default="redis://127.0.0.1:6379/0", repr=False)
    #: certificate of the authority that signs the servers' certificates, for `rediss://`
    tls_ca: Path | None = None
    #: allow a Redis without password at an address other than this machine's own
    allow_insecure: bool = False
    #: set in a head's front processes: names the keys of the messages they have taken but not acknowledged
    head_id: str | None = None
    #: engines that may be lost over one attempt at a job before it ends as failed
    max_tries: int = Field(default=5, ge=1)


class BookkeeperSettings(TaskSettings):
    """How far the bookkeeper feeds ahead and how often it looks after things."""

    #: jobs kept queued per slot of the live heads of a model
    window_per_slot: int = Field(default=4, ge=1)
    #: jobs kept queued at least, also without a head
    window_min_jobs: int = Field(default=256, ge=1)
    #: bytes of queued messages per model, of one priority and higher ones, as the server counts them
    window_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    #: share of the server's `maxmemory` above which nothing more is fed
    memory_share: float = Field(default=0.7, gt=0, le=1)
    #: seconds between two scans for lost jobs; a job is republished after two
    scan_interval_s: float = Field(default=30.0, gt=0)
    #: where `/metrics` is served for Prometheus; None: nowhere
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    #: address of that port. The page has no password: on any other address than this machine's own, guard it
    metrics_host: str = "127.0.0.1"
