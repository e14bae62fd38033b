"""What this machine has: Python, packages, disk, database, a model's files."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cli.database import opened
from cli.doctor.findings import Finding, failed, ok, warning
from cli.doctor.roles import Place, Role
from cli.errors import NotFound
from cli.output import size
from cli.packaged_model import find
from cli.settings import CliSettings
from relay.installed import installed_version
from storage.errors import StorageError
from storage.mounts import remote_kind, unsafe
from workers.gpus import driver, obstacle, torch_build
from workers.settings import HeadSettings, TailSettings

#: packages whose versions matter
PACKAGES = ["celery", "kombu", "redis", "flower", "sqlalchemy", "pydantic", "click", "rich"]
WORKER_PACKAGES = ["torch", "transformers", "tokenizers", "safetensors"]
#: free bytes below which the database and the queue are in danger
MIN_FREE_BYTES = 1_000_000_000


def _versions(names: list[str]) -> tuple[str, list[str]]:
    found, missing = [], []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    return ", ".join(found), missing


def check_versions(place: Place) -> Iterator[Finding]:
    """Python and packages; nothing is imported."""
    yield ok("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.prefix}")
    found, missing = _versions(PACKAGES)
    if missing:
        yield failed("packages", f"not installed: {', '.join(missing)}; install shardq again")
    else:
        yield ok("packages", f"shardq {installed_version()}, {found}")
    found, missing = _versions(WORKER_PACKAGES)
    if missing:
        text = f"not installed: {', '.join(missing)}; this machine cannot run a model"
        cure = "`pip install 'shardq[worker]'`"
        runs_one = place.role in (Role.HEAD, Role.TAIL)
        yield failed("worker", f"{text}: run {cure}") if runs_one else ok("worker", f"{text} ({cure} if it should)")
    else:
        yield ok("worker", found)


def check_gpu(place: Place) -> Iterator[Finding]:
    """The GPUs, and whether torch can use the device that the settings name."""
    settings = TailSettings(model="") if place.role == Role.TAIL else HeadSettings(model="")
    found, torch = driver(), torch_build()
    if settings.device != "cpu" and (problem := obstacle(settings.device, torch, found)):
        yield failed("gpu", f"device {settings.device!r} cannot be used: {problem}")
        return
    if found is None or not found.gpus:
        if place.role in (Role.HEAD, Role.TAIL):
            yield ok("gpu", "none, and none is asked for: this machine computes on the CPU")
        return
    for index, gpu in enumerate(found.gpus):
        capability = ".".join(map(str, gpu.capability))
        text = f"cuda:{index}, {gpu.name}, {size(gpu.memory_bytes)}, capability {capability}, driver {found.version}"
        if unused := obstacle(f"cuda:{index}", torch, found):
            yield warning("gpu", f"{text}, but {unused}")
        else:
            yield ok("gpu", f"{text}, torch's CUDA {torch.cuda if torch else 'none'}")


def check_disk() -> Iterator[Finding]:
    """The data directory can be written and has room."""
    folder = CliSettings().data_dir
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / f".doctor-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        mend = "make room there" if full else "make it yours, or name another with --data-dir"
        yield failed("disk", f"cannot write to {folder}: {error.strerror}; {mend}")
        return
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        yield warning("disk", f"{folder} has only {size(free)} free")
    elif kind := remote_kind(folder):
        yield warning("disk", f"{folder} {unsafe(kind)}")
    else:
        yield ok("disk", f"{folder}, {size(free)} free")


def check_database() -> Iterator[Finding]:
    """The database opens, has our schema, and is whole."""
    try:
        with opened() as database:
            damage = database.damage()
            kind = remote_kind(database.sqlite_file) if database.sqlite_file else None
            if damage:
                yield failed("database", damage)
            elif kind:
                yield warning("database", f"{database.address} {unsafe(kind)}")
            else:
                yield ok("database", database.address)
    except StorageError as error:
        yield failed("database", str(error))


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


def _indexed(path: Path) -> list[str]:
    """The weight files that the directory's index names; none where there is no index that can be read."""
    try:
        names = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({str(name) for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _directory(path: Path) -> Finding:
    missing = [name for name in ("config.json", *_indexed(path)) if not (path / name).is_file()]
    weights = sorted(path.glob("*.safetensors"))
    if missing or not weights:
        lacks = [*missing, *([] if weights else ["*.safetensors"])]
        more = f" and {len(lacks) - 2} more" if len(lacks) > 2 else ""
        return failed("model", f"{path} lacks {' and '.join(lacks[:2])}{more}")
    return ok("model", f"{path}, {size(sum(file.stat().st_size for file in weights))} of weights")
