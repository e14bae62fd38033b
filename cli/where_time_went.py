"""Where the time of a job or of a batch went."""

from __future__ import annotations

from dataclasses import dataclass

from cli.output import NOTHING, figure, print_table


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Seconds by what they went into. `other` is the time in the slot that none of the four parts explains.

    The parts of several completions overlap: where they exceed a job's time in its slot, nothing of it is `other`.
    """

    queue_s: float
    draft_s: float
    head_s: float
    link_s: float
    tail_s: float
    other_s: float

    @classmethod
    def of_job(
        cls,
        *,
        slot_s: float | None,
        queue_s: float | None,
        draft_s: float | None,
        head_s: float | None,
        link_s: float | None,
        tail_s: float | None,
    ) -> TimeSpent:
        """`slot_s`: the job's whole time in its slot."""
        parts = (draft_s or 0.0, head_s or 0.0, link_s or 0.0, tail_s or 0.0)
        return cls(queue_s or 0.0, *parts, max(0.0, (slot_s or 0.0) - sum(parts)))

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self.seconds().values())

    def seconds(self) -> dict[str, float]:
        """Name → seconds."""
        names = ("queue", "draft", "head", "link", "tail", "other")
        return {name: getattr(self, f"{name}_s") for name in names}

    def to_json(self) -> dict[str, dict[str, float | None]]:
        """Name → seconds and share of all."""
        total = self.total_s
        return {
            name: {"seconds": value, "share": value / total if total else None}
            for name, value in self.seconds().items()
        }


def print_time_spent(spent: TimeSpent) -> None:
    """A table of parts, seconds and shares."""
    total = spent.total_s
    print_table(
        ["TIME IN", "SECONDS", "SHARE", ""],
        [
            (name, figure(value, 3), f"{100 * value / total:.1f}%" if total else NOTHING, _bar(value, total))
            for name, value in spent.seconds().items()
        ],
        numbers={"SECONDS", "SHARE"},
    )


def _bar(value: float, total: float) -> str:
    return "█" * round(40 * value / total) if total else ""
