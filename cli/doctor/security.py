"""Who can listen to the servers, who can get in, and how long their certificates last."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cli.doctor.findings import Finding, failed, ok, warning
from relay.guard import is_local, redact
from relay.tls import Address, address_of, expires_at

#: seconds that a look at a certificate may take, and days below which it is worth a word
CERTIFICATE_TIMEOUT_S = 5.0
MIN_CERTIFICATE_DAYS = 30
#: server → the variable with its address
SETTINGS = {"queue": "SHARDQ_BROKER_URL", "wire": "SHARDQ_RELAY_URL"}


def check_connection(server: str, url: str, tls_ca: Path | None) -> Iterator[Finding]:
    """Of a server that answers: who can listen, who can get in, how long its certificate lasts."""
    address = address_of(url, tls_ca, allow_insecure=True)
    yield _tls(f"{server} TLS", address, SETTINGS[server])
    if not is_local(urlsplit(address.url)) and _lets_anybody_in(address):
        text = f"{redact(url)} lets everybody in without a password: see `shardq init-server`"
        yield failed(f"{server} TLS", text)


def _tls(check: str, address: Address, setting: str) -> Finding:
    if not address.tls:
        if is_local(urlsplit(address.url)):
            return ok(check, "not needed: the server is on this machine")
        return warning(check, f"none: passwords and prompts can be read on the way; use rediss:// in {setting}")
    if not address.verifies:
        return warning(check, f"{setting} switches verification off: anybody on the way can play the server")
    try:
        days = (expires_at(address, CERTIFICATE_TIMEOUT_S) - time.time()) / 86400
    except OSError as error:
        return failed(check, f"no verified connection: {error} (SHARDQ_TLS_CA)")
    authority = address.tls.get("ssl_ca_certs", "the system's authorities")
    if days < MIN_CERTIFICATE_DAYS:
        return warning(check, f"the server's certificate ends in {days:.0f} days: renew it")
    return ok(check, f"verified by {authority}, good for {days:.0f} days")


def _lets_anybody_in(address: Address) -> bool:
    parts = urlsplit(address.url)
    nobody = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    options: dict[str, Any] = {"socket_timeout": CERTIFICATE_TIMEOUT_S, "retry": Retry(NoBackoff(), 0), "protocol": 2}
    with redis.Redis.from_url(nobody, **options, **address.tls) as client:
        try:
            return bool(client.ping())
        except (redis.RedisError, OSError):
            return False
