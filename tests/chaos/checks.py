"""What must hold after a campaign. Each check is a pure function; it returns what is wrong, one text each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage.job_records import JobRow
from storage.states import JobState
from tests.chaos.field import SCAN_INTERVAL_S, STABLE_S, Death
from tests.chaos.measure import Measured
from tests.chaos.plan import Kind

#: seconds after a fault's end within which every job is with somebody again, and every process works
RECOVERY_S = 15.0
#: and as much longer for a job whose message was lost: two scans of the reconciler
SCANS_S = 2 * SCAN_INTERVAL_S
#: kinds after which a process starts anew, which takes its own time on top
RESTARTS = {
    Kind.KILL_HEAD: "head",
    Kind.LOSE_TAKEN: "head",
    Kind.DRAIN_HEAD: "head",
    Kind.KILL_TAIL: "tail",
    Kind.DRAIN_TAIL: "tail",
    Kind.KILL_BOOKKEEPER: "bookkeeper",
}
#: differences that are listed
_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Result:
    """A job as the user gets it."""

    custom_id: str
    ok: bool


def recorded_once(expected: Iterable[str], rows: Iterable[JobRow]) -> list[str]:
    """Every job stands in the database once, completed."""
    wanted = set(expected)
    found = list(rows)
    counts = Counter(row.custom_id for row in found)
    problems = [f"job {name} stands there {count} times" for name, count in sorted(counts.items()) if count > 1]
    problems += [f"job {name} is missing" for name in sorted(wanted - counts.keys())]
    problems += [f"job {name} was never submitted" for name in sorted(counts.keys() - wanted)]
    problems += [
        f"job {row.custom_id} is {row.state}" + (f": {row.error_type}: {row.error_message}" if row.error_type else "")
        for row in found
        if row.state is not JobState.COMPLETED
    ]
    return problems


def same_texts(undisturbed: Mapping[str, str | None], disturbed: Mapping[str, str | None]) -> list[str]:
    """Every text is the one that the job has when nothing happens."""
    different = [name for name in undisturbed if name not in disturbed or disturbed[name] != undisturbed[name]]
    problems = [
        f"job {name}: {disturbed.get(name)!r} instead of {undisturbed[name]!r}"[:300] for name in different[:_MAX_SHOWN]
    ]
    hidden = len(different) - len(problems)
    return [*problems, f"… and {hidden} more texts"] if hidden > 0 else problems


def results_complete(expected: Iterable[str], results: Sequence[Result]) -> list[str]:
    """`shardq results` gives every job once, and none as failed."""
    counts = Counter(result.custom_id for result in results)
    problems = [f"results: job {name} comes {counts[name]} times" for name in expected if counts[name] != 1]
    return problems + [f"results: job {result.custom_id} failed" for result in results if not result.ok]


def jobs_recovered(measured: Iterable[Measured], recovery_s: float = RECOVERY_S) -> list[str]:
    """No job was with nobody for longer than the recovery time after a fault's end."""
    problems = []
    for it in measured:
        name = f"fault {it.strike.fault.number} ({it.strike.fault.kind}, {it.strike.hit})"
        if it.wait_s > recovery_s:
            problems.append(f"{name}: a job was with nobody for {it.wait_s:.1f} s")
        if it.lost_wait_s > recovery_s + SCANS_S:
            problems.append(f"{name}: a lost job was with nobody for {it.lost_wait_s:.1f} s")
    return problems


def processes_recovered(
    measured: Iterable[Measured], boot_s: Mapping[str, float], recovery_s: float = RECOVERY_S
) -> list[str]:
    """Everything worked again within the recovery time after a fault's end; a process that was ended may take
    its usual start, `boot_s` by role, on top.
    """
    problems = []
    for it in measured:
        fault = it.strike.fault
        bound_s = recovery_s + boot_s.get(RESTARTS.get(fault.kind, ""), 0.0)
        if it.whole_s > bound_s:
            problems.append(
                f"fault {fault.number} ({fault.kind}, {it.strike.hit}): "
                f"all worked again after {it.whole_s:.1f} s, bound {bound_s:.1f} s"
            )
    return problems


def nobody_died_unasked(deaths: Iterable[Death]) -> list[str]:
    """No process that had come up ended but by a fault."""
    return [
        f"{death.child} ended by itself with status {death.status} after {death.lived_s:.0f} s: {death.last_line[:200]}"
        for death in deaths
        if not death.wanted and death.lived_s >= STABLE_S
    ]
