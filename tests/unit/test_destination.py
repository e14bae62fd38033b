"""Where commands write to."""

from __future__ import annotations

import io
import os
import stat
import threading
from pathlib import Path

import click
import pytest

from cli.destination import STDOUT, check_writable, destination, refuse_same_file, replaced
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


def test_the_option_that_named_a_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="--errors names another place"), destination(tmp_path / "no" / "x", "--errors"):
        pass


def test_a_dash_is_stdout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.chdir(tmp_path)
    write(STDOUT, "now")
    check_writable(STDOUT)
    assert out.getvalue() == "now"
    assert list(tmp_path.iterdir()) == []


def test_what_keeps_a_place_from_being_written_is_found_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("earlier")
    check_writable(path)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("earlier", [path])
    with pytest.raises(CliError, match="No such file or directory"):
        check_writable(tmp_path / "no" / "results.jsonl")
    monkeypatch.setattr("os.access", lambda place, mode: False)  # root may write everywhere
    with pytest.raises(CliError, match=f"cannot write {path}: Permission denied"):
        check_writable(path)
    with pytest.raises(CliError, match="Permission denied"):
        write(path, "now")
    assert path.read_text() == "earlier"


def test_a_pipe_whose_reader_leaves_is_no_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), replaced(tmp_path / "pipe"):
        raise BrokenPipeError


def same(first: Path, second: Path) -> bool:
    try:
        refuse_same_file({"FILE": first, "--output": None, "--errors": second})
    except click.UsageError:
        return True
    return False


def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    path, soft, hard = tmp_path / "a", tmp_path / "soft", tmp_path / "hard"
    assert same(path, tmp_path / "." / ".." / tmp_path.name / "a")
    soft.symlink_to(path)
    assert same(path, soft)
    path.touch()
    hard.hardlink_to(path)
    assert same(path, path)
    assert same(path, soft)
    assert same(hard, soft)
    with pytest.raises(click.UsageError, match=f"FILE and --errors are the same file, {soft}: name another one with -"):
        refuse_same_file({"FILE": path, "--errors": soft})
    assert not same(path, tmp_path / "b")
    (tmp_path / "b").touch()
    assert not same(path, tmp_path / "b")


def test_what_keeps_nothing_may_be_written_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not same(pipe, pipe)
    assert not same(STDOUT, STDOUT)


def test_a_link_to_itself_is_left_to_who_opens_it(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert not same(loop, tmp_path / "b")
