"""What a front process is told by the head that starts it, through its environment."""

from __future__ import annotations

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

#: prefix of these settings' environment variables
PREFIX = "SHARDQ_FRONT_"


class FrontSettings(BaseSettings):
    """Set by `workers.head.fronts`, not by hand. The queue server's address comes from `tasks.settings`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    #: path of the engine's socket, and its key in hex
    address: str
    authkey: SecretStr
    #: name of the engine process, never used again
    instance: str
    #: served name: its queue is consumed
    model: str
    #: highest version of the tasks that it takes
    reads: int = Field(ge=1)
    #: number of this front, and the jobs it takes at a time
    index: int = Field(ge=0)
    concurrency: int = Field(ge=1)
    #: the head's process: a front does not outlive it
    parent: int
    #: seconds that running jobs get to finish after SIGTERM before they are handed back
    grace_s: float = Field(default=10.0, ge=0)
    log_level: str = "WARNING"
