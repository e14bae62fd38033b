"""Real processes under their own accounts, over TLS: least rights are enough, and no password shows anywhere."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cli.processes import Processes, child_environment, shardq_argv
from tests.cli_runner import Shardq, error_of
from tests.models import tiny_model
from tests.secured_servers import MODEL, SecuredServers, free_port, secured_servers

PATIENCE_S = 240.0

# starting five processes takes long where many tests share few cores
pytestmark = pytest.mark.timeout(900)
PROMPTS = "".join(f"{json.dumps({'prompt': f'Number {n}', 'max_tokens': 8, 'temperature': 0})}\n" for n in range(6))
BOTH = ("--dtype", "float32", "--device", "cpu", "--max-length", "128")


class Installation:
    """The processes of one installation, each with the variables of its own account only."""

    def __init__(self, servers: SecuredServers, directory: Path, model: Path) -> None:
        self.servers = servers
        self._directory = directory
        self._model = str(model)
        self._lines: list[str] = []
        self._flower_port = free_port()
        #: what Flower counted, once asked
        self.metrics = ""
        #: of every account: what `doctor` found while all was well
        self.doctor: dict[str, subprocess.CompletedProcess[str]] = {}
        self._processes = Processes(lambda name, line: self._lines.append(f"{name} | {line}"))

    @property
    def database(self) -> Path:
        """The file of the bookkeeper's database."""
        return self._directory / "shardq.sqlite3"

    def environment(self, user: str) -> dict[str, str]:
        """An account's variables, and where this installation keeps its database."""
        return {
            **self.servers.variables(user),
            "SHARDQ_DATA_DIR": str(self._directory),
            "SHARDQ_DATABASE_URL": f"sqlite:///{self.database}",
            "SHARDQ_DEBUG": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    def start(self, user: str, *arguments: str) -> None:
        """Start `shardq …` as `user`."""
        self._processes.start(user, shardq_argv(*arguments), self.environment(user))

    def start_all(self) -> None:
        """Bookkeeper, Flower, tail and head."""
        self.start("bookkeeper", "bookkeeper", "--log-level", "debug")
        self.start("flower", "flower", "--port", str(self._flower_port))
        self.start("tail-gpu-b", "tail", "--model", self._model, *BOTH, "--slots", "4", "--log-level", "debug")
        head = ("--slots", "4", "--fronts", "2", "--drafter", "ngram", "--grace-s", "2", "--log-level", "debug")
        self.start("head-gpu-a", "head", "--model", self._model, *BOTH, *head)

    def ask_flower(self) -> bool:
        """Keep Flower's figures; whether it is there."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._flower_port}/metrics", timeout=10) as reply:
                self.metrics = reply.read().decode()
        except (OSError, urllib.error.URLError):
            return False
        return True

    def run(self, user: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """A command to its end; what it wrote counts as log."""
        result = subprocess.run(
            shardq_argv(*arguments),
            env=child_environment(self.environment(user)),
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=PATIENCE_S,
            check=False,
        )
        self._lines += [f"{arguments[0]} | {line}" for line in (result.stdout + result.stderr).splitlines()]
        return result

    def stop(self, *users: str) -> None:
        """SIGINT, and wait."""
        self._processes.stop(users, grace_s=20.0)

    def kill(self) -> None:
        """End everything."""
        self._processes.kill()

    def logs(self) -> str:
        """Everything that anybody wrote."""
        return "\n".join(self._lines)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Look five times a second."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert not self._processes.ended(), self.logs()
            assert time.monotonic() < deadline, f"no {what}:\n{self.logs()}"
            time.sleep(0.2)


class CommandLines(threading.Thread):
    """Collects the command lines of all processes below this one, until `stop`."""

    def __init__(self) -> None:
        super().__init__(name="command-lines", daemon=True)
        self.seen: set[str] = set()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                except OSError:
                    continue

    def stop(self) -> set[str]:
        self._stopped.set()
        self.join()
        return self.seen


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    directory = tmp_path_factory.mktemp("secured")
    model = tiny_model(directory / MODEL)
    with secured_servers(directory / "servers") as servers:
        running = Installation(servers, directory / "data", model)
        try:
            yield running
        finally:
            running.kill()


Finished = tuple[Installation, "subprocess.CompletedProcess[str]", set[str]]


@pytest.fixture(scope="module")
def finished(installation: Installation) -> Finished:
    """A batch that went through the whole installation."""
    lines = CommandLines()
    lines.start()
    installation.servers.denied()
    installation.start_all()

    def ready() -> bool:
        with installation.servers.queue.admin() as admin:
            presence = admin.get("shardq:head:gpu-a")
        return presence is not None and bool(json.loads(str(presence))["consuming"])

    installation.wait_until(ready, "head that takes jobs")
    installation.wait_until(installation.ask_flower, "Flower")
    batch = installation.run("client", "submit", "-", "--wait", "--model", MODEL, stdin=PROMPTS)
    installation.run("client", "status")
    for user in installation.servers.users():
        installation.doctor[user] = installation.run(user, "doctor", "--json")
    # long enough for every thread's beat, sweep, probe and renewal
    time.sleep(3.0)
    installation.ask_flower()
    installation.stop("flower", "head-gpu-a", "tail-gpu-b", "bookkeeper")
    return installation, batch, lines.stop()


def test_every_process_does_its_work_with_no_more_than_its_rights(finished: Finished) -> None:
    installation, batch, _ = finished
    assert batch.returncode == 0, installation.logs()
    assert installation.servers.denied() == []
    shown = installation.run("client", "results", batch.stdout.split()[0], "--format", "jsonl").stdout
    assert len(shown.splitlines()) == 6


def test_client_env_used_as_it_is_with_a_database_of_ones_own_is_refused_before_anything_is_queued(
    finished: Finished, tmp_path: Path
) -> None:
    installation, _, _ = finished
    own = Shardq(tmp_path, installation.servers.variables("client"))
    message = error_of(own("submit", "-", "--model", MODEL, stdin=PROMPTS.encode()))
    assert "not queued, the results would go elsewhere: the bookkeeper that ran last kept database" in message
    assert f"{installation.database} on " in message
    assert f"{tmp_path / 'shardq.sqlite3'} on " in message
    assert own("list", "--json").stdout.strip() == "[]"
    assert installation.servers.denied() == []
    doctor = {finding["check"]: finding for finding in json.loads(own("doctor", "--json").stdout)}
    assert (doctor["kept"]["grade"], doctor["rejected"]["grade"]) == ("failed", "ok")


def test_doctor_finds_nothing_wrong_under_any_account_while_all_is_well(finished: Finished) -> None:
    installation, _, _ = finished
    for user, result in installation.doctor.items():
        found = [each for each in json.loads(result.stdout) if each["grade"] not in ("ok", "skipped")]
        assert (user, result.returncode, found) == (user, 0, [])


def test_no_password_is_in_a_command_line(finished: Finished) -> None:
    installation, _, lines = finished
    assert any("cli.main head" in line for line in lines)
    assert any("workers.head.front" in line for line in lines)
    found = [line for line in lines for password in installation.servers.passwords() if password in line]
    assert found == []


def test_no_password_is_in_a_log_even_at_level_debug(finished: Finished) -> None:
    installation, _, _ = finished
    logs = installation.logs()
    assert "epoch 1" in logs
    assert [line for line in logs.splitlines() if any(p in line for p in installation.servers.passwords())] == []


def test_flower_sees_the_jobs_with_the_right_to_look_only(finished: Finished) -> None:
    installation, _, _ = finished
    assert 'type="task-succeeded"' in installation.metrics
    assert "permission" not in "".join(line for line in installation.logs().splitlines() if line.startswith("flower"))


def wrong_settings(servers: SecuredServers) -> dict[str, dict[str, str]]:
    """Variables that keep a client from its servers, each in another way."""
    url = servers.variables("client")["SHARDQ_BROKER_URL"]
    return {
        "another port": {"SHARDQ_BROKER_URL": url.replace(f":{servers.queue.port}/", ":1/")},
        "another account": {"SHARDQ_BROKER_URL": url.replace("//client:", "//nobody:")},
        "no such authority": {"SHARDQ_TLS_CA": "/nonexistent"},
        "no authority": {"SHARDQ_TLS_CA": ""},
        "no port": {"SHARDQ_BROKER_URL": url.replace("/0", "x/0")},
        "no TLS": {"SHARDQ_BROKER_URL": url.replace("rediss", "redis")},
        "half an address": {"SHARDQ_BROKER_URL": url.replace("@", "#@", 1)},
    }


def test_no_password_is_in_an_error_or_a_traceback(installation: Installation, tmp_path: Path) -> None:
    environment = installation.environment("client")
    secret = str(urlsplit(environment["SHARDQ_BROKER_URL"]).password)
    for case, changed in wrong_settings(installation.servers).items():
        run = Shardq(tmp_path, {**environment, **changed})
        for command in (["models"], ["doctor"], ["doctor", "--json"], ["submit", "-"]):
            result = run(*command, stdin=PROMPTS.encode())
            assert result.exit_code != 0, (case, command, result.output)
            assert secret not in result.output, (case, command)
    # one that nobody foresaw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cli.commands.models._show", lambda as_json: int(environment["SHARDQ_BROKER_URL"]))
        result = Shardq(tmp_path, environment)("models")
    assert "Traceback" in result.output
    assert "invalid literal" in result.output
    assert secret not in result.output


def test_a_bookkeeper_that_cannot_log_in_does_not_log_its_password(installation: Installation) -> None:
    environment = installation.environment("bookkeeper")
    secret = str(urlsplit(environment["SHARDQ_BROKER_URL"]).password)
    url = environment["SHARDQ_BROKER_URL"].replace(f":{installation.servers.queue.port}/", ":1/")
    result = subprocess.run(
        ["timeout", "--signal=INT", "25", *shardq_argv("bookkeeper", "--log-level", "debug")],
        env=child_environment({**environment, "SHARDQ_BROKER_URL": url}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "does not answer" in result.stdout + result.stderr
    assert secret not in result.stdout + result.stderr


def test_a_password_on_the_command_line_is_refused(tmp_path: Path) -> None:
    for option in ("--broker-url", "--relay-url", "--database-url"):
        result = Shardq(tmp_path, {})("doctor", option, "rediss://user:s3cret@queue.example.org")
        assert "SHARDQ_" in error_of(result)
        assert "s3cret" not in result.output
