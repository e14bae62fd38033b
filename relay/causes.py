"""What a Redis server's refusal or silence means, and what to do about it.

The one place that knows: the relay's errors and those of `tasks` end with what stands here.
"""

from __future__ import annotations

import socket
import ssl

import redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
)

from relay.greeting import OtherScheme
from relay.tls import verification_error

#: OpenSSL's numbers for a certificate out of its time, and for one of another host
_OVER, _OTHER_HOST = (9, 10), (62, 64)
#: how a refused login begins → what to do; the setting's name is filled in
_LOGINS = {
    "invalid username-password": "look at user and password in {}",
    "Authentication required": "{} names no user and password",
    "AUTH <password> called without": "the server knows no password: take it out of {}",
}
#: how an answer of a server that is not set up for us begins → what to do
_ANSWERS = {
    "DB index is out of range": "the server has no database of the number at the end of {}: it is /0 mostly",
    "invalid DB index": "the server has no database of the number at the end of {}: it is /0 mostly",
    "DENIED": "the server is in protected mode: give it a password, and write that into {}",
    "unknown command": "the server is too old: Redis 7 or a Valkey is needed, see {}",
}


def refusal(error: BaseException, setting: str) -> str | None:
    """What the server refuses and what to do, for an error after which trying again is no use; None for others.

    `setting` is the variable with the server's address.
    """
    if isinstance(error, OtherScheme):
        return f"{error}: write {error.scheme}:// in {setting}"
    if any(isinstance(cause, ssl.SSLError) and "NO_CERTIFICATE" in str(cause) for cause in _chain(error)):
        return f"{error} (the file of SHARDQ_TLS_CA holds no certificate)"
    if isinstance(error, AuthenticationError | AuthorizationError):
        return _with(error, _beginning(_LOGINS, str(error), setting))
    if isinstance(error, NoPermissionError):
        return _with(error, _right(str(error), setting))
    if isinstance(error, MovedError):
        return _with(error, f"it is a cluster: {setting} must name a single server")
    if isinstance(error, InvalidResponse):
        return f"what listens there is no Redis: look at host and port in {setting}"
    if isinstance(error, redis.ResponseError) and (cure := _beginning(_ANSWERS, str(error), setting)):
        return f"{str(error).partition('.')[0]} ({cure})"
    return None


def distrust(error: BaseException, setting: str) -> str | None:
    """What is wrong with the server's certificate and what to do; None for other errors."""
    found = verification_error(error)
    if found is None:
        return None
    if found.verify_code in _OVER:
        return f"{error} (renew it on the host; `date` says whether this machine's clock is right)"
    if found.verify_code in _OTHER_HOST:
        return f"{error} (the host in {setting} must be a name in the certificate)"
    return f"{error} (SHARDQ_TLS_CA must name the ca.crt of the authority that signed it)"


def silence(error: BaseException, setting: str) -> str:
    """Why no answer came and what to do, for an error after which trying again may help."""
    if isinstance(error, BusyLoadingError):
        return _with(error, "it has just started: wait")
    if "max number of clients" in str(error):
        return _with(error, "raise its `maxclients`, or end processes that nobody needs")
    return _with(error, _way(error, setting))


def _way(error: BaseException, setting: str) -> str:
    """What to look at by what the operating system said."""
    for cause in _chain(error):
        if isinstance(cause, socket.gaierror):
            return f"no such host: look at the name in {setting}"
        if isinstance(cause, ConnectionRefusedError):
            return f"nothing listens there: look at {setting}; on one machine `shardq up` starts everything"
        if isinstance(cause, FileNotFoundError):
            return f"there is no such socket file: look at {setting}"
        if isinstance(cause, TimeoutError | redis.TimeoutError):
            return f"is the host in {setting} up, and this port open in every firewall on the way?"
    return f"{setting}; the server's log may say more"


def _right(text: str, setting: str) -> str:
    if "'select'" in text:
        return f"accounts of `shardq init-server` use database 0: let {setting} end in /0"
    return "this account lacks the right: take the env file of this role from `shardq init-server`"


def _beginning(cures: dict[str, str], text: str, setting: str) -> str | None:
    return next((cure.format(setting) for start, cure in cures.items() if text.startswith(start)), None)


def _with(error: BaseException, cure: str | None) -> str:
    return f"{error} ({cure})" if cure else str(error)


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what led to it, without end-less loops."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain
