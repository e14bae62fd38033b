"""Which Redis addresses shardq agrees to use."""

from __future__ import annotations

import ipaddress
from urllib.parse import SplitResult, urlsplit, urlunsplit

from relay.errors import RelayRefused, RelayUrlInvalid

_SCHEMES = ("redis", "rediss", "unix")


def check_url(url: str, allow_insecure: bool = False, *, setting: str = "SHARDQ_RELAY_URL") -> None:
    """Refuse a Redis without password at an address other than this machine's own.

    For both roles: `setting` names the variable in the message. Raises `RelayUrlInvalid` if `url` is no Redis
    URL, `RelayRefused` if it is refused. `allow_insecure` is for networks that are private by other means.
    """
    parts = _split(url, setting)
    if allow_insecure or parts.scheme == "unix" or parts.password or _is_loopback(parts.hostname or "localhost"):
        return
    raise RelayRefused(
        f"{setting} = {redact(url)}: a Redis without a password is only used on this machine. "
        "Set a password (better: ACL users and TLS) and write it into the URL, "
        "or set SHARDQ_ALLOW_INSECURE=1 if this network is private"
    )


def redact(url: str) -> str:
    """`url` with its password replaced by `***`, for messages and logs."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "***"
    account, at, place = parts.netloc.rpartition("@")
    if not at:
        return url
    user = account.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{user}:***@{place}"))


def _split(url: str, setting: str) -> SplitResult:
    expected = "expected redis://[user:password@]host:port/0, rediss://… or unix:///path"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise RelayUrlInvalid(f"{setting} = {redact(url)}: {error}; {expected}") from error
    if parts.scheme not in _SCHEMES:
        raise RelayUrlInvalid(f"{setting} = {redact(url)}: {expected}")
    return parts


def _is_loopback(host: str) -> bool:
    """Names other than `localhost` are not resolved: what they mean can change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
