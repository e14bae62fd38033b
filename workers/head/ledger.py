"""Where one job's time, tokens and bytes went."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.generation import Metrics

#: interval over which an engine's tokens/s are averaged
RATE_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class Spent:
    """What one answered frame cost, as counted for each of its rows. Seconds and bytes."""

    draft_s: float
    head_s: float
    link_s: float
    tail_s: float
    bytes_up: int
    bytes_down: int


@dataclass(slots=True)
class Ledger:
    """The running figures of one generation. A row is charged its frame's whole times: all rows wait for them."""

    #: of the hidden states between head and tail; None before the job got its slot
    wire_dtype: str | None = None
    started_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)
    first_commit: float | None = None
    last_commit: float | None = None
    #: tokens of the first commit: they lie before the decoding interval
    num_first: int = 0
    num_tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    #: how often [drafted][accepted], a list of drafted + 1 counts for each number drafted
    by_draft: list[list[int]] = field(default_factory=list)
    cached_tokens: int = 0
    draft_s: float = 0.0
    head_s: float = 0.0
    link_s: float = 0.0
    tail_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0

    @classmethod
    def together(cls, ledgers: Sequence[Ledger]) -> Ledger:
        """One job's figures from those of its choices that got a slot, the first one's first; at least one.

        Sums, but for the clocks, which go from the first beginning to the last commit, and `cached_tokens`: the prompt
        is the same for all, and what later choices copy is mostly the first one's.
        """
        first = min(ledgers, key=lambda ledger: ledger.first_commit or math.inf)
        commits = [ledger.last_commit for ledger in ledgers if ledger.last_commit is not None]
        sums: dict[str, Any] = {name: sum(getattr(ledger, name) for ledger in ledgers) for name in _SUMMED}
        return cls(
            wire_dtype=ledgers[0].wire_dtype,
            started_at=ledgers[0].started_at,
            started=ledgers[0].started,
            first_commit=first.first_commit,
            last_commit=max(commits, default=None),
            num_first=first.num_first,
            cached_tokens=ledgers[0].cached_tokens,
            by_draft=_added([ledger.by_draft for ledger in ledgers]),
            **sums,
        )

    @property
    def has_started(self) -> bool:
        """Whether the clocks run: the job got its slot."""
        return self.wire_dtype is not None

    def start(self, wire_dtype: str) -> None:
        """Start the clocks: the job has its slot, on a head that sends hidden states in `wire_dtype`."""
        self.wire_dtype = wire_dtype
        self.started_at, self.started = time.time(), time.perf_counter()

    def spend(self, spent: Spent) -> None:
        """Charge one answered frame."""
        self.draft_s += spent.draft_s
        self.head_s += spent.head_s
        self.link_s += spent.link_s
        self.tail_s += spent.tail_s
        self.bytes_up += spent.bytes_up
        self.bytes_down += spent.bytes_down

    def commit(self, num_tokens: int) -> None:
        """Count tokens that now belong to the job's text."""
        now = time.perf_counter()
        if self.first_commit is None:
            self.first_commit, self.num_first = now, num_tokens
        self.last_commit = now
        self.num_tokens += num_tokens

    def count_round(self, *, drafted: int, accepted: int, kept: int) -> None:
        """Count a speculative round; what lies behind a cut of the text (`kept` tokens stay) does not count."""
        self.rounds += 1
        self.round_tokens += kept
        if kept <= accepted:
            drafted = accepted = kept
        self.drafted += drafted
        self.accepted += accepted
        while len(self.by_draft) <= drafted:
            self.by_draft.append([0] * (len(self.by_draft) + 1))
        self.by_draft[drafted][accepted] += 1

    def decode_tps(self) -> float | None:
        """Tokens after the first commit / (last commit - first commit); None without an interval."""
        if self.first_commit is None or self.last_commit is None or self.last_commit <= self.first_commit:
            return None
        return (self.num_tokens - self.num_first) / (self.last_commit - self.first_commit)

    def metrics(self) -> Metrics:
        """The final figures."""
        first, last = self.first_commit, self.last_commit
        return Metrics(
            started_at=self.started_at,
            finished_at=self.started_at + (time.perf_counter() if last is None else last) - self.started,
            ttft_s=None if first is None else first - self.started,
            decode_tps=self.decode_tps(),
            rounds=self.rounds,
            tokens_per_round=self.round_tokens / self.rounds if self.rounds else None,
            drafted=self.drafted,
            accepted=self.accepted,
            cached_tokens=self.cached_tokens,
            wire_bytes_up=self.bytes_up,
            wire_bytes_down=self.bytes_down,
            draft_s=self.draft_s,
            head_s=self.head_s,
            link_s=self.link_s,
            tail_s=self.tail_s,
            wire_dtype=self.wire_dtype,
            rounds_by_draft=tuple(tuple(counts) for counts in self.by_draft),
        )


def _added(histograms: Sequence[list[list[int]]]) -> list[list[int]]:
    longest = max(map(len, histograms), default=0)
    total = [[0] * (drafted + 1) for drafted in range(longest)]
    for histogram in histograms:
        for drafted, counts in enumerate(histogram):
            total[drafted] = [mine + more for mine, more in zip(total[drafted], counts, strict=True)]
    return total


#: fields of a ledger that add up over the choices of a job
_SUMMED = (
    *("num_tokens", "rounds", "round_tokens", "drafted", "accepted"),
    *("draft_s", "head_s", "link_s", "tail_s", "bytes_up", "bytes_down"),
)


class Rate:
    """An engine's tokens per second over the last seconds."""

    def __init__(self) -> None:
        self._commits: deque[tuple[float, int]] = deque()

    def count(self, num_tokens: int) -> None:
        """Tokens were committed now."""
        now = time.perf_counter()
        self._commits.append((now, num_tokens))
        while self._commits[0][0] < now - RATE_WINDOW_S:
            self._commits.popleft()

    def per_s(self) -> float:
        """Any thread may ask."""
        since = time.perf_counter() - RATE_WINDOW_S
        return sum(count for at, count in tuple(self._commits) if at >= since) / RATE_WINDOW_S
