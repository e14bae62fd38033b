"""What `shardq doctor` found, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cli.control_characters import visible
from cli.output import console, state


class Grade(StrEnum):
    """How a check ended; only `FAILED` makes the exit status 1."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked."""

    check: str
    grade: Grade
    #: what was found, and what to do if that is not good
    text: str


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, Grade.OK, text)


def skipped(check: str, text: str) -> Finding:
    """Was not looked at: the account may not, or the role has no use for it."""
    return Finding(check, Grade.SKIPPED, text)


def warning(check: str, text: str) -> Finding:
    """Works, or may work later, but somebody should look."""
    return Finding(check, Grade.WARNING, text)


def failed(check: str, text: str) -> Finding:
    """Does not work."""
    return Finding(check, Grade.FAILED, text)


def show(finding: Finding) -> None:
    """A line on stdout."""
    line = state(finding.grade.value)
    line.pad_right(8 - len(finding.grade.value))
    line.append(f"{finding.check:<11}", style="bold")
    line.append(visible(finding.text), style="")
    console().print(line, soft_wrap=True)
