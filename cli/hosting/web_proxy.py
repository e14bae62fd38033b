"""The files of the public host's web proxy: nginx in front of Flower and the metrics, with TLS and a password."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

#: who may see the pages
WEB_USER = "shardq"
#: what everybody may fetch: the wheel of the shardq that the host runs
WHEELS_PATH = "/wheels/"
#: where the two pages listen on the host itself
FLOWER_PORT, METRICS_PORT = 5555, 9464


def password_line(password: str) -> str:
    """For nginx' file of users: a salted hash. The password is random, so nobody can guess back from it."""
    salt = os.urandom(16)
    digest = hashlib.sha1(password.encode() + salt).digest()  # nginx' {SSHA} knows no other one
    return f"{WEB_USER}:{{SSHA}}{base64.b64encode(digest + salt).decode()}"


def nginx_conf(port: int, *, ipv6: bool, of_root: bool) -> list[str]:
    """For nginx from 1.18; `ipv6`: listen there, too, which a host without it refuses.

    `of_root`: the files are root's to read, and workers of another user, as by default, could not. It needs no right
    but to read its files, and writes to /tmp only.
    """
    return [
        "# Start it as the owner of this directory: nginx -p DIR/web -c nginx.conf",
        *(["user root;"] if of_root else []),
        "worker_processes 1;",
        "daemon off;",
        "pid /tmp/nginx.pid;",
        "error_log stderr warn;",
        "events { worker_connections 256; }",
        "http {",
        *(f"  {kind}_temp_path /tmp/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")),
        "  access_log off;",
        "  server_tokens off;",
        "  client_max_body_size 64k;",
        "  server {",
        f"    listen {port} ssl;",
        *([f"    listen [::]:{port} ssl;"] if ipv6 else []),
        "    ssl_certificate ../tls/server.crt;",
        "    ssl_certificate_key ../tls/server.key;",
        "    ssl_protocols TLSv1.2 TLSv1.3;",
        '    auth_basic "shardq";',
        "    auth_basic_user_file users;",
        "    add_header X-Content-Type-Options nosniff always;",
        "    add_header X-Frame-Options DENY always;",
        "    proxy_set_header Host $http_host;",
        "    # the password is nobody else's business",
        '    proxy_set_header Authorization "";',
        f"    location = /metrics {{ proxy_pass http://127.0.0.1:{METRICS_PORT}; }}",
        f"    location {WHEELS_PATH} {{ auth_basic off; alias wheels/; autoindex on; autoindex_format json; }}",
        "    # Flower's remote control",
        "    location /api/ { return 403; }",
        f"    location / {{ proxy_pass http://127.0.0.1:{FLOWER_PORT}; }}",
        "  }",
        "}",
    ]


def wheel_directory(directory: Path) -> Path:
    """What `WHEELS_PATH` shows."""
    return directory / "web" / "wheels"


def password_file(directory: Path) -> Path:
    """Where the password stands that `init-server` made, for its owner only."""
    return directory / "web" / "password"
