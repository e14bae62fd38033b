"""`shardq doctor`: what is wrong with this installation, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import click
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cli.database import opened
from cli.doctor_link import COST_PER_GB, check_link
from cli.errors import ExitCode, NotFound
from cli.findings import Finding, Grade, failed, ok, show, warning
from cli.options import broker_option, database_option, insecure_option, json_option, relay_option
from cli.output import print_json, size
from cli.packaged_model import find
from cli.settings import CliSettings
from relay.errors import RelayError
from relay.guard import is_local, redact
from relay.settings import RelaySettings
from relay.streams import RedisRelay
from relay.tls import Address, address_of, expires_at
from storage.errors import StorageError
from tasks import keys
from tasks.connection import connect, translated
from tasks.errors import TaskError
from tasks.heads import live_heads, registered_models
from tasks.settings import TaskSettings

#: packages whose versions matter
PACKAGES = ["celery", "kombu", "redis", "flower", "sqlalchemy", "pydantic", "click", "rich"]
WORKER_PACKAGES = ["torch", "transformers", "tokenizers", "safetensors"]
#: free bytes below which the database and the queue are in danger
MIN_FREE_BYTES = 1_000_000_000
#: seconds that a look at a certificate may take, and days below which it is worth a word
CERTIFICATE_TIMEOUT_S = 5.0
MIN_CERTIFICATE_DAYS = 30
#: round trips measured
PINGS = 5


@click.command("doctor")
@click.option("--model", metavar="MODEL", help="Also look at this model's files.  [env: SHARDQ_MODEL]")
@click.option("--link", is_flag=True, help="Measure the link instead, and say what to expect of it.")
@click.option(
    "--cost-per-gb",
    type=click.FloatRange(min=0),
    default=COST_PER_GB,
    show_default=True,
    help="With --link: dollars for a GB that leaves the host.",
)
@json_option
@database_option
@broker_option
@relay_option
@insecure_option
@click.pass_context
def doctor_command(ctx: click.Context, model: str | None, link: bool, cost_per_gb: float, as_json: bool) -> None:
    """Say what is wrong with this installation.

    Looks at versions, disk, database, both Redis servers, their certificates, bookkeeper, heads, tails and a
    model's files. Shows no password.
    With --link: this machine's way to both servers, and for every pair at work tokens/s, GB and cost an hour, and
    what limits it.
    Exit status 1 if something does not work.

    \b
    shardq doctor
    shardq doctor --model ./Qwen2.5-7B-Instruct
    shardq doctor --link
    """
    findings: list[Finding] = []
    checks = [partial(check_link, cost_per_gb)] if link else _checks(model or os.environ.get("SHARDQ_MODEL"))
    for check in checks:
        for finding in check():
            findings.append(finding)
            if not as_json:
                show(finding)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    if any(finding.grade == Grade.FAILED for finding in findings):
        ctx.exit(ExitCode.ERROR)


def _checks(model: str | None) -> list[Callable[[], Iterator[Finding]]]:
    return [
        check_versions,
        check_disk,
        check_database,
        check_queue,
        check_wire,
        check_security,
        lambda: check_model(model),
    ]


def _versions(names: list[str]) -> tuple[str, list[str]]:
    found, missing = [], []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    return ", ".join(found), missing


def check_versions() -> Iterator[Finding]:
    """Python and packages; nothing is imported."""
    yield ok("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.prefix}")
    found, missing = _versions(PACKAGES)
    if missing:
        yield failed("packages", f"not installed: {', '.join(missing)}; install shardq again")
    else:
        yield ok("packages", found)
    found, missing = _versions(WORKER_PACKAGES)
    if missing:
        text = f"not installed: {', '.join(missing)}; this machine cannot run a model"
        yield warning("worker", f"{text} (`pip install 'shardq[worker]'` if it should)")
    else:
        yield ok("worker", found)


def check_disk() -> Iterator[Finding]:
    """The data directory can be written and has room."""
    folder = CliSettings().data_dir
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / f".doctor-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        yield failed("disk", f"cannot write to {folder}: {error.strerror}; name another with --data-dir")
        return
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        yield warning("disk", f"{folder} has only {size(free)} free")
    else:
        yield ok("disk", f"{folder}, {size(free)} free")


def check_database() -> Iterator[Finding]:
    """The database opens, has our schema, and is whole."""
    try:
        with opened() as database:
            damage = database.damage()
            yield failed("database", damage) if damage else ok("database", database.address)
    except StorageError as error:
        yield failed("database", str(error))


def check_queue() -> Iterator[Finding]:
    """The queue server, and what it knows of bookkeeper and heads."""
    settings = TaskSettings()
    try:
        client = connect(settings)
        with translated():
            yield ok("queue", f"{redact(settings.broker_url)}, round trip {_round_trip_ms(client):.1f} ms")
            yield from _queue_configuration(client)
            yield from _bookkeeper(client)
            yield from _heads(client)
    except (TaskError, RelayError) as error:
        yield failed("queue", f"{error} (SHARDQ_BROKER_URL; is Redis running there?)")


def _round_trip_ms(client: redis.Redis) -> float:
    client.ping()
    times = []
    for _ in range(PINGS):
        start = time.perf_counter()
        client.ping()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[PINGS // 2]


def _queue_configuration(client: redis.Redis) -> Iterator[Finding]:
    try:
        # CONFIG GET would say the same, but no account may use it
        policy = str(client.info("memory").get("maxmemory_policy", "noeviction"))
        persistent = client.info("persistence").get("aof_enabled", 1)
    except redis.ResponseError:
        return  # an account without the right to look, or a hosted server
    if policy != "noeviction":
        yield failed("queue", f"maxmemory-policy is {policy}: jobs would be dropped; set it to noeviction")
    if not persistent:
        yield warning("queue", "no append-only file: a restart of this server loses the queue until it is fed again")


def _bookkeeper(client: redis.Redis) -> Iterator[Finding]:
    if client.exists(keys.BOOKKEEPER):
        yield ok("bookkeeper", "alive")
    else:
        yield warning("bookkeeper", "none is alive: start one with `shardq bookkeeper`")


def _heads(client: redis.Redis) -> Iterator[Finding]:
    heads = live_heads(client)
    models = ", ".join(registered_models(client)) or "none"
    if not heads:
        yield warning("heads", f"none is alive (models registered: {models}): start one with `shardq head`")
    for head in heads:
        alone = ", the whole model in one process" if head.whole else ""
        text = f"{head.head_id} serves {head.model} with {head.slots} slots{alone}"
        if head.consuming:
            yield ok("heads", text)
        else:
            yield warning("heads", f"{text}, but has no tail and takes no jobs: start one with `shardq tail`")


def check_wire() -> Iterator[Finding]:
    """The wire server and the tails on it."""
    url = RelaySettings().url
    try:
        relay = RedisRelay(url, allow_insecure=TaskSettings().allow_insecure)
        rtt_ms, tails = 1000 * relay.ping(), relay.tails()
        relay.close()
    except RelayError as error:
        if _needs_no_tail():
            yield ok("wire", "not needed: every head that is alive has the whole model")
        else:
            yield failed("wire", f"{error} (SHARDQ_RELAY_URL; is Redis running there?)")
        return
    yield ok("wire", f"{redact(url)}, round trip {rtt_ms:.1f} ms")
    if not tails and not _needs_no_tail():
        yield warning("tails", "none is alive: start one with `shardq tail`")
    for tail in tails:
        layers = "no layers before a head has chosen the split" if tail.split is None else f"layers from {tail.split}"
        yield ok("tails", f"{tail.tail}, {layers}, up to {tail.slots} slots")


def _needs_no_tail() -> bool:
    """Whether heads are alive, and all of them are whole."""
    try:
        with translated():
            heads = live_heads(connect(TaskSettings()))
    except TaskError:
        return False
    return bool(heads) and all(head.whole for head in heads)


def check_security() -> Iterator[Finding]:
    """Who can listen, who can get in, and how long the certificates last."""
    tasks, relay = TaskSettings(), RelaySettings()
    for check, url, setting in (
        ("queue TLS", tasks.broker_url, "SHARDQ_BROKER_URL"),
        ("wire TLS", relay.url, "SHARDQ_RELAY_URL"),
    ):
        try:
            address = address_of(url, relay.tls_ca, allow_insecure=tasks.allow_insecure, setting=setting)
        except RelayError as error:
            yield failed(check, str(error))
            continue
        yield _tls(check, address, setting)
        if not is_local(urlsplit(address.url)) and _lets_anybody_in(address):
            yield failed(check, f"{redact(url)} lets everybody in without a password: see `shardq init-server`")


def _tls(check: str, address: Address, setting: str) -> Finding:
    if not address.tls:
        if is_local(urlsplit(address.url)):
            return ok(check, "not needed: the server is on this machine")
        return warning(check, f"none: passwords and prompts can be read on the way; use rediss:// in {setting}")
    if not address.verifies:
        return warning(check, f"{setting} switches verification off: anybody on the way can play the server")
    try:
        days = (expires_at(address, CERTIFICATE_TIMEOUT_S) - time.time()) / 86400
    except OSError as error:
        return failed(check, f"no verified connection: {error} (SHARDQ_TLS_CA)")
    authority = address.tls.get("ssl_ca_certs", "the system's authorities")
    if days < MIN_CERTIFICATE_DAYS:
        return warning(check, f"the server's certificate ends in {days:.0f} days: renew it")
    return ok(check, f"verified by {authority}, good for {days:.0f} days")


def _lets_anybody_in(address: Address) -> bool:
    parts = urlsplit(address.url)
    nobody = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    options: dict[str, Any] = {"socket_timeout": CERTIFICATE_TIMEOUT_S, "retry": Retry(NoBackoff(), 0), "protocol": 2}
    with redis.Redis.from_url(nobody, **options, **address.tls) as client:
        try:
            return bool(client.ping())
        except (redis.RedisError, OSError):
            return False


def check_model(model: str | None) -> Iterator[Finding]:
    """The files of a model; the demo's if none is named and this machine can run one."""
    if model is None:
        if _versions(WORKER_PACKAGES)[1]:
            return
        try:
            yield ok("demo model", str(find()))
        except NotFound as error:
            yield warning("demo model", str(error))
        return
    path = Path(model).expanduser()
    if path.is_dir():
        yield _directory(path)
    elif path.is_file():
        good = path.suffix == ".gguf"
        yield ok("model", str(path)) if good else failed("model", f"{path} is no directory and no .gguf file")
    elif model.startswith((".", "/", "~")):
        yield failed("model", f"{path} does not exist")
    else:
        yield ok("model", f"{model} would come from the Hugging Face hub (`shardq models prepare {model}`)")


def _directory(path: Path) -> Finding:
    missing = [name for name in ("config.json",) if not (path / name).is_file()]
    weights = sorted(path.glob("*.safetensors"))
    if missing or not weights:
        lacks = " and ".join([*missing, *([] if weights else ["*.safetensors"])])
        return failed("model", f"{path} lacks {lacks}")
    return ok("model", f"{path}, {size(sum(file.stat().st_size for file in weights))} of weights")
