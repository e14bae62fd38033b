"""The notebooks of `deploy/notebooks` run cell by cell, with stand-ins for the secrets, the GPUs and `shardq`."""

from __future__ import annotations

import base64
import io
import json
import os
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cli.commands.workers import head_command, tail_command
from cli.hosting import certificates

NOTEBOOKS = Path(__file__).parents[2] / "deploy" / "notebooks"
COMMANDS = {"head": head_command, "tail": tail_command}
ROLES = tuple(COMMANDS)
SECRETS = {
    "SHARDQ_CA": "a certificate",
    "SHARDQ_HEAD_ENV": "# passwords\nSHARDQ_BROKER_URL=rediss://h:p@q:1/0\nSHARDQ_RELAY_URL=rediss://h:p=@q:2/0\n"
    "SHARDQ_TLS_CA=/etc/shardq/ca.crt\n",
    "SHARDQ_TAIL_ENV": "SHARDQ_RELAY_URL=rediss://t:p@q:2/0\nSHARDQ_TLS_CA=/etc/shardq/ca.crt\nSHARDQ_TAIL_NAME=tail\n",
}
NVIDIA_SMI = """#!/bin/sh
echo "GPU 0: Tesla T4"
echo "GPU 1: Tesla T4"
"""
#: ends with the statuses it was given, one after another, and keeps its arguments
STAND_IN = """#!{python}
import json, os, sys, time
from pathlib import Path
here = Path(__file__).parent
with (here / "calls").open("a") as calls:
    told = [os.environ[name] for name in ("SHARDQ_TLS_CA", "SHARDQ_RELAY_URL")]
    calls.write(json.dumps([sys.argv[1:], *told, os.environ.get("HF_TOKEN")]) + "\\n")
statuses = json.loads((here / "statuses").read_text())
(here / "statuses").write_text(json.dumps(statuses[1:]))
if statuses[0] == "runs on":
    time.sleep(60)
sys.exit(statuses[0])
"""
Run = Callable[..., list[Any]]


def cells(role: str) -> list[str]:
    """The sources of a notebook's code cells."""
    book = json.loads((NOTEBOOKS / f"{role}.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a notebook's cells; the calls of `shardq` that it made."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    store = ModuleType("kaggle_secrets")
    monkeypatch.setitem(sys.modules, "kaggle_secrets", store)
    gpus = tmp_path / "gpus" / "nvidia-smi"
    gpus.parent.mkdir()
    gpus.write_text(NVIDIA_SMI)
    gpus.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gpus.parent}:{os.environ['PATH']}")
    command = tmp_path / "bin" / "shardq"
    command.parent.mkdir()
    command.write_text(STAND_IN.format(python=sys.executable))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    (command.parent / "calls").touch()

    def calls(role: str, statuses: list[Any], secrets: dict[str, str] = SECRETS, **changes: Any) -> list[Any]:
        class Client:
            def get_secret(self, name: str) -> str:
                return secrets[name]

        store.UserSecretsClient = Client  # type: ignore[attr-defined]
        (command.parent / "statuses").write_text(json.dumps(statuses))
        first, *others = cells(role)
        names: dict[str, Any] = {}
        exec(compile(first, f"{role}.ipynb", "exec"), names)
        names |= {"VENV": tmp_path, "WORK": tmp_path / "secrets", "FIRST_PAUSE_S": 0.01, "LAST_PAUSE_S": 0.02} | changes
        for source in others:
            exec(compile(source, f"{role}.ipynb", "exec"), names)
        return [json.loads(line) for line in (command.parent / "calls").read_text().splitlines()]

    return calls


@pytest.mark.parametrize("role", ROLES)
def test_a_notebook_is_of_format_4_without_outputs(role: str) -> None:
    book = json.loads((NOTEBOOKS / f"{role}.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    for cell in book["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.parametrize("role", ROLES)
def test_what_ends_in_an_error_is_started_again_until_it_ends_in_order(
    run: Run, role: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = run(role, [1, -9, 0])
    assert len(calls) == 3
    assert "again in 0.02 s" in capfd.readouterr().out
    for arguments, authority, address, token in calls:
        assert token is None
        assert Path(authority).read_text() == "a certificate\n"
        assert f"{address}\n" in SECRETS[f"SHARDQ_{role.upper()}_ENV"]
        COMMANDS[role].make_context(role, list(arguments[1:]))
        assert arguments[0] == role


def test_a_head_is_told_to_end_in_time_and_drafts_on_the_other_gpu(run: Run) -> None:
    ((arguments, *_),) = run("head", [0])
    context = COMMANDS["head"].make_context("head", list(arguments[1:]))
    assert 11.4 * 3600 < float(context.params["until"].rstrip("s")) <= 11.5 * 3600
    assert (context.params["device"], context.params["drafter_device"]) == ("cuda:0", "cuda:1")


def test_both_notebooks_tell_their_halves_the_same_of_the_model(run: Run) -> None:
    head, tail = (run(role, [0])[-1][0] for role in ROLES)
    params = [
        COMMANDS[arguments[0]].make_context(arguments[0], list(arguments[1:])).params for arguments in (head, tail)
    ]
    for name in ("model", "dtype", "wire_dtype", "max_length", "split", "quantization"):
        assert params[0][name] == params[1][name]


def test_a_tail_that_runs_on_is_told_to_end_when_the_time_is_up(run: Run) -> None:
    began = time.monotonic()
    assert len(run("tail", ["runs on"], ENDS=time.time() + 0.6, LEAST_S=0.1)) == 1
    assert time.monotonic() - began < 20


def test_a_command_line_that_is_refused_is_not_tried_again(run: Run) -> None:
    with pytest.raises(SystemExit, match="refused"):
        run("head", [2, 0])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", ["SHARDQ_CA", "env"])
def test_a_secret_that_is_missing_is_named(run: Run, role: str, name: str) -> None:
    name = f"SHARDQ_{role.upper()}_ENV" if name == "env" else name
    with pytest.raises(SystemExit, match=f"{name} is missing: Add-ons > Secrets"):
        run(role, [0], {key: value for key, value in SECRETS.items() if key != name})
    with pytest.raises(SystemExit, match=r"has no .*SHARDQ_RELAY_URL: paste the whole env file"):
        run(role, [0], dict.fromkeys(SECRETS, "nothing"))


@pytest.mark.parametrize("role", ROLES)
def test_colab_keeps_secrets_elsewhere_and_has_one_gpu(
    run: Run, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in SECRETS.items()}
    google, colab = ModuleType("google"), ModuleType("google.colab")
    colab.userdata = SimpleNamespace(get=encoded.__getitem__)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "google", google)
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    monkeypatch.setitem(sys.modules, "kaggle_secrets", None)  # importing it fails
    (tmp_path / "gpus" / "nvidia-smi").write_text(NVIDIA_SMI.rpartition("echo")[0])
    ((arguments, authority, address, _),) = run(role, [0])
    assert Path(authority).read_text() == "a certificate\n"
    assert f"{address}\n" in SECRETS[f"SHARDQ_{role.upper()}_ENV"]
    params = COMMANDS[role].make_context(role, list(arguments[1:])).params
    assert params["device"] == "cuda:0"
    assert params.get("drafter_device", "cuda:0") == "cuda:0"
    del encoded["SHARDQ_CA"]
    with pytest.raises(SystemExit, match="SHARDQ_CA is missing: the key on the left"):
        run(role, [0])


def test_a_token_of_the_hub_is_passed_on(run: Run) -> None:
    assert run("tail", [0], {**SECRETS, "HF_TOKEN": "hf_a_token"})[0][3] == "hf_a_token"


def test_a_host_with_a_certificate_that_everybody_knows_needs_no_authority(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDQ_TLS_CA", "none")
    secrets = {name: text.replace("SHARDQ_TLS_CA=/etc/shardq/ca.crt\n", "") for name, text in SECRETS.items()}
    del secrets["SHARDQ_CA"]
    assert run("tail", [0], secrets)[0][1] == "none"


@pytest.mark.parametrize("role", ROLES)
def test_a_notebook_without_a_gpu_says_so(run: Run, role: str, tmp_path: Path) -> None:
    (tmp_path / "gpus" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(SystemExit, match="no GPU: choose one"):
        run(role, [0])


# -- the wheel --------------------------------------------------------------------------------------------------------

WHEEL = "shardq-0.1.0-py3-none-any.whl"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that a notebook runs to install; none of them really runs."""
    commands: list[list[str]] = []

    def note(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[0] != "nvidia-smi":
            commands.append(command)
        return subprocess.CompletedProcess(command, 0, "GPU 0: T4\n", "")

    monkeypatch.setattr(subprocess, "run", note)
    return commands


@dataclass(frozen=True)
class Host:
    """What a host's proxy offers."""

    #: the env file's variables
    env: str
    authority: str
    folder: Path


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A web server with a certificate of its own, and no wheel yet."""
    made = certificates.make(["localhost"], days=1)
    folder, pair = tmp_path / "web", tmp_path / "pair.pem"
    (folder / "wheels").mkdir(parents=True)
    pair.write_bytes(made.certificate + made.key)

    class Handler(SimpleHTTPRequestHandler):
        def list_directory(self, path: Any) -> Any:
            names = [{"name": entry.name, "type": "file"} for entry in Path(path).iterdir()]
            self.send_response(200)
            self.end_headers()
            return io.BytesIO(json.dumps(names).encode())

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"SHARDQ_WHEELS_URL=https://localhost:{server.server_port}/wheels/\n"
    yield Host(SECRETS["SHARDQ_TAIL_ENV"] + place, (made.authority or b"").decode(), folder)
    server.shutdown()
    server.server_close()


def test_a_notebook_installs_what_the_host_offers(
    run: Run, installed: list[list[str]], host: Host, tmp_path: Path
) -> None:
    (host.folder / "wheels" / WHEEL).write_bytes(b"a wheel")
    secrets = {"SHARDQ_CA": host.authority, "SHARDQ_TAIL_ENV": host.env}
    where = {"VENV": tmp_path / "new", "INPUT": tmp_path / "input"}
    with pytest.raises(FileNotFoundError):  # nothing was really installed
        run("tail", [0], secrets, **where)
    fetched = tmp_path / "secrets" / WHEEL
    assert fetched.read_bytes() == b"a wheel"
    assert installed[-1][-1] == f"shardq[worker] @ {fetched.as_uri()}"


def test_a_wheel_that_lies_there_comes_first(run: Run, installed: list[list[str]], tmp_path: Path) -> None:
    lying = tmp_path / "input" / "dataset" / WHEEL
    lying.parent.mkdir(parents=True)
    lying.touch()
    with pytest.raises(FileNotFoundError):
        run("tail", [0], VENV=tmp_path / "new", INPUT=tmp_path / "input")
    assert installed[-1][-1] == f"shardq[worker] @ {lying.as_uri()}"


@pytest.mark.parametrize(
    ("authority", "said"), [(None, "has no wheel: run `shardq server update"), ("another", "CERTIFICATE_VERIFY_FAILED")]
)
def test_a_host_without_a_wheel_or_with_another_certificate_is_named(
    run: Run, host: Host, tmp_path: Path, authority: str | None, said: str
) -> None:
    other = (certificates.make(["localhost"], days=1).authority or b"").decode()
    secrets = {"SHARDQ_CA": other if authority else host.authority, "SHARDQ_TAIL_ENV": host.env}
    with pytest.raises(SystemExit, match=said):
        run("tail", [0], secrets, VENV=tmp_path / "new", INPUT=tmp_path / "input")
