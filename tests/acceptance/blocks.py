"""Run a document's shell blocks as a reader would, against a system of a test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cli.processes import child_environment
from tests.acceptance.system import System
from tests.documents import ROOT, Block, blocks, shell_blocks

#: seconds for one block
PATIENCE_S = 120.0


def run_blocks(document: Path, system: System, folder: Path) -> int:
    """Run the blocks that can be run, in order, in one folder; how many. Fails with what a block wrote."""
    command = folder / "bin" / "shardq"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m cli.main "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    shutil.copytree(ROOT / "examples", folder / "examples")
    environment = child_environment(system.environment)
    environment["PATH"] = f"{command.parent}{os.pathsep}{environment['PATH']}"
    runnable = [block for block in shell_blocks(document) if block.not_run is None]
    for block in runnable:
        _run(block, environment, folder)
    return len(runnable)


def run_python(document: Path, system: System, folder: Path) -> None:
    """Run the blocks marked `python` that can be run as one script, as the cells of a notebook."""
    cells = [block for block in blocks(document) if block.language == "python" and block.not_run is None]
    assert cells, document
    script = folder / "cells.py"
    script.write_text("\n".join(block.text for block in cells), encoding="utf-8")
    environment = child_environment({**system.environment, "PYTHONPATH": str(ROOT)})
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, f"{document}\n{result.stdout}\n{result.stderr}"


def _run(block: Block, environment: dict[str, str], folder: Path) -> None:
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, f"{block} ended with {result.returncode}\n{result.stdout}\n{result.stderr}"
