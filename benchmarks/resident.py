"""Memory of processes as Linux counts it, and the most of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: megabytes: resident; and its share of what is resident, where pages of several processes count in parts
Memory = tuple[float, float]


@dataclass(slots=True)
class Resident:
    """The most that each of some processes, and all of them together, had resident."""

    by_process: dict[str, Memory] = field(default_factory=dict)
    #: the largest sum at one moment
    together_mb: float = 0.0
    together_pss_mb: float = 0.0

    def raise_to(self, now: Mapping[str, Memory]) -> None:
        """Take in what they have now."""
        for name, (rss, pss) in now.items():
            before = self.by_process.get(name, (0.0, 0.0))
            self.by_process[name] = max(rss, before[0]), max(pss, before[1])
        self.together_mb = max(self.together_mb, sum(rss for rss, _ in now.values()))
        self.together_pss_mb = max(self.together_pss_mb, sum(pss for _, pss in now.values()))


def resident_of(pid: int) -> Memory:
    """Of a process and its children: a server that writes its file anew has a child. (0, 0) once it is gone."""
    own = _one(pid)
    below = [resident_of(child) for child in _children(pid)]
    return own[0] + sum(rss for rss, _ in below), own[1] + sum(pss for _, pss in below)


def table(phases: Mapping[str, Resident]) -> str:
    """Rows of processes, columns of phases, in Markdown."""
    names = dict.fromkeys(name for phase in phases.values() for name in phase.by_process)
    rows = [
        ["", *phases],
        ["---", *("---:" for _ in phases)],
        *([name, *(_cell(*phase.by_process[name]) for phase in phases.values())] for name in names),
        ["**together**", *(_cell(phase.together_mb, phase.together_pss_mb) for phase in phases.values())],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(rss: float, pss: float) -> str:
    return f"{rss:.0f} ({pss:.0f})"


def _one(pid: int) -> Memory:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0.0
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("Rss:", "Pss:"))}
    return kilobytes.get("Rss", 0) / 1024, kilobytes.get("Pss", 0) / 1024


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
