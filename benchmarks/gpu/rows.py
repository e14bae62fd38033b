"""The lines of the table, and how they are written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `value` None: not measured, and `note` says why."""

    section: str
    work: str
    value: float | None
    unit: str = ""
    #: e.g. "≤ 7.5"; empty: no target of its own
    wanted: str = ""
    #: least time that the bytes of the weights take, in the unit of `value`
    floor: float | None = None
    note: str = ""
    #: whoever started the benchmark did not ask for it
    left_out: bool = False

    @property
    def holds(self) -> bool | None:
        """Whether the value is as wanted; None without a target or without a value."""
        if not self.wanted or self.value is None:
            return None
        sign, _, bound = self.wanted.partition(" ")
        return self.value >= float(bound) if sign == "≥" else self.value <= float(bound)

    @property
    def failed(self) -> bool:
        """Whether it is not as wanted, or could not be measured although it was asked for."""
        return self.holds is False or (self.value is None and not self.left_out)

    def line(self) -> str:
        """The row of a markdown table."""
        value = "–" if self.value is None else f"{_number(self.value)} {self.unit}".strip()
        times = f"{self.value / self.floor:.1f} ×" if self.value is not None and self.floor else ""
        wanted = f"{self.wanted} {self.unit}".strip() if self.wanted else ""
        holds = {True: "yes", False: "**no**", None: ""}[self.holds]
        return f"| {self.section} | {self.work} | {value} | {times} | {wanted} | {holds} | {self.note} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    """All rows as a markdown table."""
    head = "| section | work | measured | to the floor | wanted | holds | |\n|---|---|---|---|---|---|---|"
    return "\n".join([head, *(row.line() for row in rows)])


def write(directory: Path, name: str, heading: Sequence[str], rows: Sequence[Row]) -> None:
    """`name`.md and `name`.json in `directory`; `heading` says machine, versions and date."""
    directory.mkdir(parents=True, exist_ok=True)
    text = "\n".join(["# The GPU's work", "", *heading, "", table(rows), ""])
    (directory / f"{name}.md").write_text(text, encoding="utf-8")
    content = {"heading": list(heading), "rows": [{**asdict(row), "holds": row.holds} for row in rows]}
    (directory / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
