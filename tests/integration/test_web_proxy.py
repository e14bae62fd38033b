"""The proxy of the public host: a real nginx with the files that `init-server` writes."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cli.hosting.web_proxy import FLOWER_PORT, METRICS_PORT, WEB_USER, wheel_directory
from tests.cli_runner import Shardq
from tests.secured_servers import free_port

WHEEL = "shardq-0.1.0-py3-none-any.whl"


@dataclass
class Page:
    """What stands behind the proxy: answers every path, and keeps what it was told of passwords."""

    port: int
    authorizations: list[str | None]


@dataclass(frozen=True)
class Proxy:
    """A running nginx, and what a visitor needs."""

    url: str
    password: str
    trusts: ssl.SSLContext
    page: Page

    def get(self, path: str, password: str | None = None) -> tuple[int, str]:
        """Status and body."""
        headers = {}
        if password is not None:
            headers["Authorization"] = f"Basic {b64encode(f'{WEB_USER}:{password}'.encode()).decode()}"
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10, context=self.trusts) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    found = Page(0, [])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.authorizations.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"page {self.path}".encode())

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, page: Page) -> Iterator[Proxy]:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("no nginx found: install nginx-light")
    directory, port = tmp_path_factory.mktemp("host") / "server", free_port()
    done = Shardq(tmp_path_factory.mktemp("data"), {})(
        "init-server", str(directory), "--host", "localhost", "--web-port", str(port)
    )
    assert done.exit_code == 0, done.stderr
    conf = directory / "web" / "nginx.conf"
    text = conf.read_text().replace("/tmp/", f"{directory}/")  # several of these tests may run at a time
    for fixed in (FLOWER_PORT, METRICS_PORT):
        text = text.replace(f":{fixed};", f":{page.port};")
    conf.write_text(text)
    # as under systemd: a socket, which can be written to and not be opened
    messages, theirs = socket.socketpair()
    process = subprocess.Popen([program, "-p", str(conf.parent), "-c", conf.name], stderr=theirs)
    theirs.close()
    trusts = ssl.create_default_context(cafile=str(directory / "ca" / "ca.crt"))
    password = (directory / "web" / "password").read_text().strip()
    (wheel_directory(directory) / WHEEL).write_bytes(b"a wheel")
    running = Proxy(f"https://localhost:{port}", password, trusts, page)
    try:
        _wait_listening(running, process, messages)
        yield running
    finally:
        process.terminate()
        process.wait(10)
        messages.close()


def _wait_listening(proxy: Proxy, process: subprocess.Popen[bytes], messages: socket.socket) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            proxy.get("/")
        except OSError:
            assert process.poll() is None, messages.recv(10_000).decode()
            assert time.monotonic() < deadline, "nginx does not listen"
            time.sleep(0.05)
        else:
            return


def test_nobody_sees_a_page_without_the_password(proxy: Proxy) -> None:
    proxy.page.authorizations.clear()
    assert [proxy.get(path)[0] for path in ("/", "/metrics", "/api/workers")] == [401, 401, 403]
    assert proxy.get("/", "wrong")[0] == 401
    assert proxy.page.authorizations == []


def test_with_the_password_both_pages_are_there_and_are_not_told_it(proxy: Proxy) -> None:
    proxy.page.authorizations.clear()
    assert proxy.get("/tasks", proxy.password) == (200, "page /tasks")
    assert proxy.get("/metrics", proxy.password) == (200, "page /metrics")
    assert proxy.page.authorizations == [None, None]


def test_everybody_may_fetch_the_wheel_and_nothing_beside_it(proxy: Proxy) -> None:
    proxy.page.authorizations.clear()
    status, listing = proxy.get("/wheels/")
    assert (status, [entry["name"] for entry in json.loads(listing)]) == (200, [WHEEL])
    assert proxy.get(f"/wheels/{WHEEL}") == (200, "a wheel")
    for path in ("/wheels/../password", "/wheels/%2e%2e/password", "/wheels../password", "/wheels/../users"):
        assert proxy.get(path)[0] in (400, 401, 404), path
    assert proxy.page.authorizations == []


def test_remote_control_is_nobodys(proxy: Proxy) -> None:
    assert proxy.get("/api/worker/shutdown/any", proxy.password)[0] == 403
