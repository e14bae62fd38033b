"""Which file systems a database and a queue are not safe on."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.mounts import remote_kind
from tests.cli_runner import Shardq

#: as Linux writes them: number, parent, device, root, where, options - kind, source, options
LINES = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/share rw shared:1 - {kind} server:/export rw
31 30 8:2 / /mnt/share/local rw - xfs /dev/sdb1 rw
32 22 0:41 / /mnt/with\\040space rw - {kind} server:/other rw
"""


def mounted(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(LINES.format(kind=kind))
    return path


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "fuse.gcsfuse", "fuse", "drvfs"])
def test_files_of_another_machine_are_known_by_the_nearest_mount(tmp_path: Path, kind: str) -> None:
    mounts = mounted(tmp_path, kind)
    for path in ("/mnt/share", "/mnt/share/not/there/yet", "/mnt/with space/data"):
        assert remote_kind(Path(path), mounts) == kind
    for path in ("/srv/data", "/mnt/share/local/data", "/mnt/shared"):
        assert remote_kind(Path(path), mounts) is None


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "apfs"])
def test_this_machines_own_disks_are_no_reason_for_a_word(tmp_path: Path, kind: str) -> None:
    assert remote_kind(Path("/mnt/share/data"), mounted(tmp_path, kind)) is None


def test_where_nobody_tells_nothing_is_said(tmp_path: Path) -> None:
    assert remote_kind(Path("/mnt/share"), tmp_path / "none") is None


def test_doctor_warns_of_the_data_directory_and_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.doctor.machine.remote_kind", lambda path: "nfs4")
    shown = Shardq(tmp_path / "data", {})("doctor").stdout.splitlines()
    for check in ("disk", "database"):
        (line,) = [line for line in shown if line.split()[1] == check]
        assert line.startswith("warning")
        assert "is on nfs4, where locks and flushes are not kept" in line


def test_up_warns_before_it_starts_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.commands.up.remote_kind", lambda path: "fuse.sshfs")
    monkeypatch.setattr("cli.commands.up.check_devices", lambda settings: None)
    (tmp_path / "up.lock").mkdir()  # so that it ends there
    result = Shardq(tmp_path, {})("up", "--model", "m")
    assert f"warning: {tmp_path} is on fuse.sshfs" in result.output
