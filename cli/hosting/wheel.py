"""The wheel of the shardq that runs here, packed from its installation, so that notebooks install the same."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from cli.errors import CliError
from cli.hosting.accounts import write_whole
from cli.hosting.web_proxy import wheel_directory

#: what an installer writes beside what it unpacks
_OF_INSTALLERS = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
#: zip knows no earlier one
_DATE = (1980, 1, 1, 0, 0, 0)


def put_wheel(directory: Path) -> Path:
    """Pack the shardq that runs, for notebooks to fetch, in place of other versions; the wheel.

    Raises CliError where this shardq is a link to a clone and its wheel must be built there, and OSError.
    """
    place = wheel_directory(directory)
    place.mkdir(mode=0o700, exist_ok=True)
    present = sorted(place.glob("shardq-*.whl"))
    try:
        name, content = pack()
    except CliError:
        if present:
            return present[-1]
        raise
    write_whole(place / name, content)
    for other in present:
        if other.name != name:
            other.unlink()
    return place / name


def pack(installed: Distribution | None = None) -> tuple[str, bytes]:
    """Name and content of the wheel; by default of the shardq that runs.

    Raises CliError for an installation that is a link to a clone: its files are the clone's.
    """
    installed = installed or distribution("shardq")
    folder = f"shardq-{installed.version}.dist-info"
    contents = {name: content for name, content in _files(installed, folder) if content is not None}
    if not any(name.startswith("cli/") for name in contents):
        raise CliError(
            "this shardq runs from a clone: make its wheel there, `python -m hatchling build -t wheel -d DIR`"
        )

    contents[f"{folder}/RECORD"] = _record(contents, folder)
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    return f"shardq-{installed.version}-py3-none-any.whl", target.getvalue()


def _files(installed: Distribution, folder: str) -> Iterator[tuple[str, bytes | None]]:
    for path in installed.files or []:
        name = path.as_posix()
        if name.startswith("..") or "__pycache__" in path.parts or name.endswith(".pth"):
            continue
        if path.parts[0] == folder and path.name in _OF_INSTALLERS:
            continue
        yield name, path.read_binary()


def _record(contents: dict[str, bytes], folder: str) -> bytes:
    """The list of files that a wheel ends with, as its specification wants it."""
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in contents.items()]
    return "".join(f"{line}\n" for line in [*lines, f"{folder}/RECORD,,"]).encode()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
