"""A campaign as text."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from statistics import median

from tests.chaos.campaign import Campaign
from tests.chaos.checks import SCANS_S
from tests.chaos.measure import Measured
from tests.chaos.plan import Kind

_HEADINGS = (
    f"{'kind':<18} {'faults':>6} {'flow p50':>9} {'max':>6} {'whole p50':>10} {'max':>6}"
    f" {'wait p50':>9} {'max':>6} {'lost max':>9}"
)


def report(campaign: Campaign) -> str:
    """Everything worth reading, the verdict last."""
    return "\n".join(
        [*_header(campaign), "", *_table(campaign.measured), "", *_counts(campaign), "", *_checks(campaign)]
    )


def _header(campaign: Campaign) -> list[str]:
    options = campaign.options
    kinds = {it.strike.fault.kind for it in campaign.measured}
    return [
        f"chaos campaign, seed {options.seed}: {options.jobs} jobs, "
        f"{len(campaign.measured)} faults of {len(kinds)} kinds, "
        f"{options.num_heads} heads, {options.num_heads + 1} tails",
        f"{platform.machine()}, Python {platform.python_version()}, load {campaign.load:.1f}; starting all at once: "
        + ", ".join(f"{role} {seconds:.1f} s" for role, seconds in campaign.boot_s.items()),
        f"undisturbed {campaign.undisturbed_s:.0f} s, disturbed {campaign.disturbed_s:.0f} s",
    ]


def _table(measured: Sequence[Measured]) -> list[str]:
    lines = [
        "seconds from a fault's end until: flow, the next job is recorded; whole, every process works;",
        "wait, the longest that a job is with nobody; lost, the same of jobs whose message was lost",
        _HEADINGS,
    ]
    for kind in Kind:
        chosen = [it for it in measured if it.strike.fault.kind is kind]
        if chosen:
            lines.append(_row(kind, chosen))
    return [*lines, _row("all", measured)]


def _row(name: str, measured: Sequence[Measured]) -> str:
    flows = [it.flow_s for it in measured if it.flow_s is not None]
    whole, waits = [it.whole_s for it in measured], [it.wait_s for it in measured]
    lost = max(it.lost_wait_s for it in measured)
    flow = f"{median(flows):>9.1f} {max(flows):>6.1f}" if flows else f"{'–':>9} {'–':>6}"
    return (
        f"{name:<18} {len(measured):>6} {flow} {median(whole):>10.1f} {max(whole):>6.1f} "
        f"{median(waits):>9.1f} {max(waits):>6.1f} {lost:>9.1f}"
    )


def _counts(campaign: Campaign) -> list[str]:
    busy = sum(it.strike.num_open > 0 for it in campaign.measured)
    bound_s = campaign.options.recovery_s
    late = sum(it.whole_s > bound_s for it in campaign.measured)
    calls = sum(it.num_calls for it in campaign.submitted)
    return [
        f"{busy} faults struck while jobs were open; after {late} of them not all worked again within {bound_s:g} s",
        f"{len(campaign.submitted)} files took {calls} calls of `shardq submit`; "
        f"killed: {'; '.join(campaign.kills) or 'none'}",
        f"{len(campaign.deaths)} processes ended, {sum(not it.wanted for it in campaign.deaths)} of them unasked; "
        f"{campaign.num_requeued} jobs queued again by the reconciler; "
        f"{campaign.num_duplicates} duplicate records counted",
        f"{campaign.num_unfair} jobs were left out: their texts hang on rounding",
    ]


def _checks(campaign: Campaign) -> list[str]:
    bound_s = campaign.options.recovery_s
    lines = [
        f"bounds: {bound_s:g} s, for a lost message {bound_s + SCANS_S:g} s; a restarted process' own start on top"
    ]
    for name, problems in campaign.problems.items():
        lines.append(f"{'FAILED' if problems else 'ok':<7} {name}")
        lines += [f"        {problem}" for problem in problems]
    return [*lines, "passed" if campaign.passed else "FAILED"]
