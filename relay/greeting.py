"""Connections that notice when the server speaks TLS and the address does not say so, or the other way round.

Either way the server does not say what is wrong: it ends the connection, or waits for ever. One look at it tells.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

import redis
from redis.connection import Connection, SSLConnection

#: seconds that a handshake may take, and each step of a look
HANDSHAKE_S = 5.0
LOOK_S = 3.0


class OtherScheme(redis.RedisError):
    """The server speaks another protocol than its address says. No ConnectionError: trying again is no use."""

    def __init__(self, message: str, scheme: str) -> None:
        super().__init__(message)
        #: what the address should begin with
        self.scheme = scheme


class PlainConnection(Connection):
    """A connection without TLS."""

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Raises OtherScheme for a server that speaks TLS."""
        try:
            super().on_connect_check_health(check_health)
        except redis.ConnectionError as error:
            # only what a server without a word does: one that answers speaks our protocol
            if type(error) is redis.ConnectionError and speaks_tls(self.host, self.port):
                raise OtherScheme("the server speaks TLS", "rediss") from error
            raise


class TlsConnection(SSLConnection):
    """A connection with TLS."""

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        """Raises OtherScheme for a Redis without TLS."""
        patience_s = sock.gettimeout()
        sock.settimeout(HANDSHAKE_S if patience_s is None else min(patience_s, HANDSHAKE_S))
        try:
            wrapped: ssl.SSLSocket = super()._wrap_socket_with_ssl(sock)  # type: ignore[no-untyped-call]
        except ssl.SSLCertVerificationError:
            raise
        except OSError as error:
            sock.close()
            if speaks_redis(self.host, self.port):
                raise OtherScheme("the server speaks no TLS", "redis") from error
            raise
        wrapped.settimeout(patience_s)
        return wrapped


def speaks_tls(host: str, port: int) -> bool:
    """Whether a TLS handshake succeeds; whose certificate it is does not matter, for nothing is sent."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), LOOK_S) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except OSError:
        return False


def speaks_redis(host: str, port: int) -> bool:
    """Whether a Redis answers without TLS, if only to refuse; no password is sent."""
    try:
        with socket.create_connection((host, port), LOOK_S) as plain:
            plain.sendall(b"PING\r\n")
            return plain.recv(1) in (b"+", b"-")
    except OSError:
        return False


def noticing(url: str) -> dict[str, Any]:
    """redis-py's arguments for connections to this address; none for a socket file, which needs none of it."""
    kind = {"redis": PlainConnection, "rediss": TlsConnection}.get(url.partition("://")[0])
    return {"connection_class": kind, "socket_keepalive": True} if kind else {}
