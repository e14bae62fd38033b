"""Which Redis addresses shardq agrees to use, and what of them may be shown."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, parse_qsl, urlsplit

from relay.errors import RelayRefused, RelayUrlInvalid

_SCHEMES = ("redis", "rediss", "unix")
#: what may stand behind the `?` of an address: redis-py would take host and password from there, too
QUERY_NAMES = frozenset({"ssl_ca_certs", "ssl_cert_reqs", "ssl_check_hostname", "ssl_certfile", "ssl_keyfile"})

#: behind host and port: nothing is 0, and redis-py would take anything else for 0, too
_DATABASE = re.compile(r"(/[0-9]*)?")

_EXPECTED = "expected redis://[user:password@]host:port/0, rediss://… (TLS) or unix:///path"


def check_url(url: str, allow_insecure: bool = False, *, setting: str = "SHARDQ_RELAY_URL") -> None:
    """Refuse a Redis without password at an address other than this machine's own.

    For both roles: `setting` names the variable in the message. Raises `RelayUrlInvalid` if `url` is no Redis
    URL, `RelayRefused` if it is refused. `allow_insecure` is for networks that are private by other means.
    """
    parts = _split(url, setting)
    if allow_insecure or parts.password or is_local(parts):
        return
    raise RelayRefused(
        f"{setting} = {redact(url)}: a Redis without a password is only used on this machine. "
        "Set a password (better: ACL users and TLS, see `shardq init-server`) and write it into the URL, "
        "or set SHARDQ_ALLOW_INSECURE=1 if this network is private"
    )


def redact(url: str) -> str:
    """`url` with its password replaced by `***`, for messages and logs."""
    scheme, separator, rest = url.partition("://")
    # from the right: a password with an unescaped `/`, `#` or `@` must not show either
    account, at, place = rest.rpartition("@")
    if not at:
        return url
    return f"{scheme}{separator}{account.partition(':')[0]}:***@{place}"


def is_local(parts: SplitResult) -> bool:
    """Whether an address can only mean this machine: a socket file, `localhost` or a loopback address.

    Other names are not resolved, even if they mean this machine now: what they mean can change. `0.0.0.0` and
    abbreviated addresses are not taken either.
    """
    return parts.scheme == "unix" or _is_loopback(parts.hostname or "localhost")


def _split(url: str, setting: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
        names = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    except ValueError:
        # the cause is left out: its text may repeat a part of the password
        raise RelayUrlInvalid(f"{setting} = {redact(url)} is no Redis address; {_EXPECTED}") from None
    if parts.scheme not in _SCHEMES:
        raise RelayUrlInvalid(f"{setting} = {redact(url)}: {_EXPECTED}")
    if unknown := sorted(names - QUERY_NAMES):
        raise RelayUrlInvalid(
            f"{setting}: {', '.join(unknown)} cannot be given behind the `?` of an address; "
            f"known are {', '.join(sorted(QUERY_NAMES))}"
        )
    if parts.scheme != "unix" and not _DATABASE.fullmatch(parts.path):
        raise RelayUrlInvalid(f"{setting} = {redact(url)}: the database at its end must be a number, /0 mostly")
    if parts.fragment:
        raise RelayUrlInvalid(f"{setting}: write `#` in a password as %23, `/` as %2F, `?` as %3F, `@` as %40")
    return parts


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
