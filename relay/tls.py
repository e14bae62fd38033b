"""How a server's certificate is verified: always, unless its address says otherwise in so many words."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from relay.errors import RelayUrlInvalid
from relay.guard import check_url

#: of an address that names none
DEFAULT_PORT = 6379

_VERIFY = {"required": ssl.CERT_REQUIRED, "none": ssl.CERT_NONE}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
#: parameters that name files
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True, slots=True)
class Address:
    """A checked address, as redis-py, kombu and Celery understand it alike."""

    #: without parameters
    url: str
    #: redis-py's TLS arguments, also good for Celery's `broker_use_ssl`; empty without TLS
    tls: dict[str, Any] = field(default_factory=dict)

    @property
    def verifies(self) -> bool:
        """Whether it is made sure that the server is the one that was meant."""
        return bool(self.tls) and self.tls["ssl_cert_reqs"] is ssl.CERT_REQUIRED and self.tls["ssl_check_hostname"]


def address_of(
    url: str, tls_ca: Path | None = None, *, allow_insecure: bool = False, setting: str = "SHARDQ_RELAY_URL"
) -> Address:
    """Check `url` (`guard.check_url`) and take its TLS parameters apart.

    With `rediss://` the server must show a certificate for the address's host, signed by a known authority or
    by `tls_ca`, which `ssl_ca_certs` in the address overrides. Only `ssl_cert_reqs=none` or
    `ssl_check_hostname=false` in the address switch that off. Raises `RelayRefused` or `RelayUrlInvalid`.
    """
    check_url(url, allow_insecure, setting=setting)
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query))
    plain = url.partition("?")[0]
    if parts.scheme != "rediss":
        if given:
            raise RelayUrlInvalid(f"{setting}: {', '.join(sorted(given))} needs rediss:// (TLS)")
        return Address(plain)
    tls: dict[str, Any] = {
        "ssl_cert_reqs": _choice(given, "ssl_cert_reqs", "required", _VERIFY, setting),
        "ssl_check_hostname": _choice(given, "ssl_check_hostname", "true", _BOOLEANS, setting),
    }
    if tls["ssl_cert_reqs"] is ssl.CERT_NONE:
        tls["ssl_check_hostname"] = False
    files = {"ssl_ca_certs": str(tls_ca)} if tls_ca is not None else {}
    files |= {name: given[name] for name in _FILES if name in given}
    for name, file in files.items():
        _check_readable(file, f"{setting if name in given else 'SHARDQ_TLS_CA'}: {file} ({name})")
    return Address(plain, tls | files)


def _check_readable(file: str, what: str) -> None:
    """Raise RelayUrlInvalid now: at the first connection it would be taken for the server's fault."""
    try:
        with Path(file).open("rb"):
            return
    except FileNotFoundError as error:
        raise RelayUrlInvalid(f"{what} does not exist") from error
    except OSError as error:
        raise RelayUrlInvalid(f"{what} cannot be read: {error.strerror}") from error


def expires_at(address: Address, timeout_s: float) -> float:
    """Unix time until which the certificate of a server that `address` verifies is good. Raises OSError."""
    parts = urlsplit(address.url)
    host = parts.hostname or "localhost"
    context = ssl.create_default_context()
    if "ssl_ca_certs" in address.tls:
        context.load_verify_locations(address.tls["ssl_ca_certs"])
    if "ssl_certfile" in address.tls:
        context.load_cert_chain(address.tls["ssl_certfile"], address.tls.get("ssl_keyfile"))
    with (
        socket.create_connection((host, parts.port or DEFAULT_PORT), timeout_s) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        certificate = connection.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))


def distrusts(error: BaseException) -> bool:
    """Whether a connection failed because the server's certificate was not accepted: trying again is no use."""
    return verification_error(error) is not None


def verification_error(error: BaseException) -> ssl.SSLCertVerificationError | None:
    """What led to an error, if it was that the server's certificate was not accepted."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _choice(given: dict[str, str], name: str, default: str, choices: dict[str, Any], setting: str) -> Any:
    value = given.get(name, default).lower()
    if value not in choices:
        raise RelayUrlInvalid(f"{setting}: {name} must be one of {', '.join(choices)}, not {value!r}")
    return choices[value]
