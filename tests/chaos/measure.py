"""How long things did not work after each fault, from what the watch saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.faults import Strike
from tests.chaos.plan import LOSSES
from tests.chaos.watch import Sample, subject

#: a job that nobody had for less than this was only on its way: heads tell what they have every two seconds
ON_ITS_WAY_S = 3.5


@dataclass(frozen=True, slots=True)
class Stretch:
    """A job that nobody had, from `begin` to `end` (Unix times)."""

    task_id: str
    begin: float
    end: float
    #: it ended because the reconciler queued the job again
    requeued: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """A fault and what followed. Seconds since its end."""

    strike: Strike
    #: until the next job was recorded; None if none was open, or none was recorded before the next fault
    flow_s: float | None
    #: until every process worked that stopped working before the next fault
    whole_s: float
    #: the longest that a job was with nobody
    wait_s: float
    #: the same of jobs whose messages were lost: the reconciler's scans find them
    lost_wait_s: float


def stretches(samples: Sequence[Sample]) -> list[Stretch]:
    """All stretches in which a job was with nobody, those of jobs on their way left out."""
    found = []
    since: dict[str, Sample] = {}
    for sample in samples:
        for task_id in [task_id for task_id in since if task_id not in sample.stranded]:
            begin = since.pop(task_id)
            requeued = sample.open_jobs.get(task_id, 0) > begin.open_jobs[task_id]
            found.append(Stretch(task_id, begin.at, sample.at, requeued))
        for task_id in sample.stranded:
            since.setdefault(task_id, sample)
    found += [Stretch(task_id, begin.at, samples[-1].at, False) for task_id, begin in since.items()]
    return [stretch for stretch in found if stretch.end - stretch.begin >= ON_ITS_WAY_S]


def outages(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Begin and end (Unix times) of every stretch in which a process or a server did not work."""
    found = []
    since: dict[str, float] = {}
    for sample in samples:
        ill = {subject(text) for text in sample.unwell}
        found += [(since.pop(name), sample.at) for name in since.keys() - ill]
        for name in ill:
            since.setdefault(name, sample.at)
    return found + [(begin, samples[-1].at) for begin in since.values()]


def measure(strikes: Sequence[Strike], samples: Sequence[Sample], recorded: Sequence[float]) -> list[Measured]:
    """One line per fault; `recorded` are the Unix times at which jobs' ends were recorded."""
    waits, down = stretches(samples), outages(samples)
    until = [*(strike.began for strike in strikes[1:]), float("inf")]
    return [
        _measure(strike, min(end, strike.until), samples, waits, recorded, down)
        for strike, end in zip(strikes, until, strict=True)
    ]


def _measure(
    strike: Strike,
    until: float,
    samples: Sequence[Sample],
    waits: Sequence[Stretch],
    recorded: Sequence[float],
    down: Sequence[tuple[float, float]],
) -> Measured:
    window = [sample for sample in samples if strike.ended <= sample.at < until]
    overlapping = [stretch for stretch in waits if stretch.begin < until and stretch.end > strike.ended]
    lost = [it for it in overlapping if it.requeued or strike.fault.kind in LOSSES]
    return Measured(
        strike=strike,
        flow_s=_flow_s(strike, until, window, recorded),
        whole_s=max((end - strike.ended for begin, end in down if strike.began <= begin < until), default=0.0),
        wait_s=_longest_s(strike.ended, [it for it in overlapping if it not in lost]),
        lost_wait_s=_longest_s(strike.ended, lost),
    )


def _flow_s(strike: Strike, until: float, window: Sequence[Sample], recorded: Sequence[float]) -> float | None:
    if not window or not window[0].open_jobs:
        return None
    return min((at - strike.ended for at in recorded if strike.ended <= at < until), default=None)


def _longest_s(ended: float, waits: Sequence[Stretch]) -> float:
    return max((stretch.end - max(stretch.begin, ended) for stretch in waits), default=0.0)
