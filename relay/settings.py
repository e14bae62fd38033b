"""Settings of the relay; the only reader of its environment variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from relay.codec import MAX_FRAME_BYTES


class RelaySettings(BaseSettings):
    """Each field is also the environment variable `SHARDQ_RELAY_<FIELD>`. Times are in seconds."""

    # The address may hold a password: it is kept out of reprs and error messages.
    model_config = SettingsConfigDict(
        env_prefix="SHARDQ_RELAY_",
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
        env_ignore_empty=True,
        populate_by_name=True,
    )

    #: the server that carries the frames between head and tail
    url: str = Field(default="redis://127.0.0.1:6380/0", repr=False)
    #: certificate of the authority that signs the servers' certificates, for `rediss://`; SHARDQ_TLS_CA
    tls_ca: Path | None = Field(default=None, validation_alias="SHARDQ_TLS_CA")
    #: a tail or a head that was silent this long is taken for dead
    ttl_s: float = Field(default=10.0, gt=0)
    #: time between two refreshes of a presence or a lease
    refresh_s: float = Field(default=2.0, gt=0)
    #: longest a read waits at the server before it is asked anew
    block_s: float = Field(default=1.0, gt=0)
    #: an epoch is given up once the server has been unreachable or silent this long
    patience_s: float = Field(default=10.0, gt=0)
    #: life of the streams of an epoch that nobody renews
    stream_ttl_s: int = Field(default=300, ge=1)
    #: frames kept per lane and direction; more in flight than this are lost
    frames_kept: int = Field(default=32, ge=2)
    #: longest frame that is read or written, in bytes; head and tail must agree. The head makes rounds and chunks that
    #: fit it
    max_frame_bytes: int = Field(default=MAX_FRAME_BYTES, ge=4 << 20)
