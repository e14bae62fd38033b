"""What a batch of jobs came to, from the figures that the head writes into every job's outcome."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from tasks.generation import Metrics, Outcome


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outcomes of jobs that were queued together, in their order; `time.perf_counter` around all of it."""

    outcomes: tuple[Outcome, ...]
    began: float
    ended: float

    @property
    def num_tokens(self) -> int:
        return sum(len(outcome.token_ids) for outcome in self.outcomes)

    @property
    def wall_s(self) -> float:
        """From the moment the first job got its slot to the last one's last token: without the queue's part."""
        metrics = self._metrics()
        return max(m.finished_at for m in metrics) - min(m.started_at for m in metrics)

    @property
    def tokens_per_s(self) -> float:
        """All completion tokens / `wall_s`: prefill, ramp and drain included."""
        return self.num_tokens / self.wall_s

    @property
    def decoding_tokens_per_s(self) -> float:
        """Tokens behind each job's first one / the time from the first of those to the last token of all."""
        metrics = self._metrics()
        first = min(m.started_at + (m.ttft_s or 0.0) for m in metrics)
        return (self.num_tokens - len(metrics)) / (max(m.finished_at for m in metrics) - first)

    @property
    def tokens_per_round(self) -> float:
        """Of a job, on average."""
        return self.mean("tokens_per_round")

    @property
    def wire_bytes_per_s(self) -> float:
        """Bytes that head and tail sent each other / `wall_s`."""
        return sum(m.wire_bytes_up + m.wire_bytes_down for m in self._metrics()) / self.wall_s

    @property
    def mbit_s(self) -> float:
        return self.wire_bytes_per_s * 8 / 1e6

    @property
    def gb_per_hour(self) -> float:
        return self.wire_bytes_per_s * 3600 / 1e9

    def mean(self, figure: str) -> float:
        """The mean of one of the jobs' metrics over the jobs that have it; 0 if none has."""
        values = [getattr(m, figure) for m in self._metrics()]
        return fmean([value for value in values if value is not None] or [0.0])

    def round_ms(self) -> str:
        """Where a round's time went, by a job's account."""
        metrics = self._metrics()
        rounds = sum(m.rounds for m in metrics) or 1
        parts = ("draft", "head", "link", "tail")
        sums = {part: sum(getattr(m, f"{part}_s") for m in metrics) for part in parts}
        between = sum(m.finished_at - m.started_at for m in metrics) - sum(sums.values())
        return (
            ", ".join(f"{part} {1000 * spent / rounds:.1f}" for part, spent in sums.items())
            + f", else {1000 * between / rounds:.1f} ms a round"
        )

    def _metrics(self) -> list[Metrics]:
        return [outcome.metrics for outcome in self.outcomes if outcome.metrics is not None]
