"""Where commands write to."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from cli.destination import destination, replaced
from cli.errors import CliError


def write(path: Path, text: str) -> None:
    with destination(path) as out:
        out.write(text)


def write_half(path: Path) -> None:
    with replaced(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError


def test_a_file_appears_only_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("earlier")
    with destination(path) as out:
        out.write("now")
        out.flush()
        assert path.read_text() == "earlier"
    assert path.read_text() == "now"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("earlier")
    with pytest.raises(ZeroDivisionError):
        write_half(path)
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    path, link = tmp_path / "results.jsonl", tmp_path / "latest"
    path.write_text("earlier")
    link.symlink_to(path)
    write(link, "now")
    assert link.is_symlink()
    assert path.read_text() == "now"


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    # as a device: a file in the place of `/dev/null` breaks a machine
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write(pipe, "now")
    reader.join(10)
    assert read == ["now"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_the_name_of_an_open_file_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        before = path.stat().st_ino
        write(Path(f"/dev/fd/{descriptor}"), "now")
        assert (path.read_text(), path.stat().st_ino) == ("now", before)
    finally:
        os.close(descriptor)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=f"cannot write {tmp_path}/no/results.jsonl: No such file or directory"):
        write(tmp_path / "no" / "results.jsonl", "now")
