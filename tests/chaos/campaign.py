"""A campaign: the undisturbed run, then the same jobs under faults, then the checks."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import redis
from sqlalchemy import select

from benchmarks.link_simulator import LinkShape
from cli.errors import ExitCode
from storage.database import Database
from storage.job_records import JobRow
from storage.jobs import iterate_results
from storage.tables import batch
from tests.chaos import checks, remains
from tests.chaos.faults import Strike, Striker
from tests.chaos.field import Death, Field
from tests.chaos.measure import ON_ITS_WAY_S, Measured, measure, stretches
from tests.chaos.plan import NEED_ALL, Fault, Kind, draw
from tests.chaos.requests import Judge, requests, text_of
from tests.chaos.submissions import Submissions, Submitted, name_of
from tests.chaos.watch import LOOK_S, Sample, Watch
from tests.cli_runner import Shardq

#: round trip between head and tail, in milliseconds: jobs take seconds, as on a long link
RTT_MS = 240.0
#: shares of jobs run undisturbed beyond those needed: some texts hang on rounding
SPARE = 0.1
#: a fault that is not recovered from by then is given up
GIVE_UP_S = 90.0
#: seconds for all processes to start, for the undisturbed run, and for what is left after the last fault
START_S, UNDISTURBED_S, DRAIN_S = 300.0, 900.0, 600.0
#: seconds that a fault waits for open jobs to strike among
WORK_S = 20.0
#: seconds after the last job within which nothing may be left
REST_S = 30.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What a campaign is."""

    jobs: int = 200
    faults: int = 100
    seed: int = 1
    num_heads: int = 2
    kinds: Sequence[Kind] = tuple(Kind)
    #: jobs in one submitted file
    portion: int = 4
    min_tokens: int = 32
    max_tokens: int = 96
    #: a fault is followed by the next once everything has worked for this long
    settle_s: float = 2.0
    #: seconds after a fault's end within which all must be well again
    recovery_s: float = checks.RECOVERY_S


@dataclass(frozen=True, slots=True)
class Campaign:
    """What happened."""

    options: Options
    measured: list[Measured]
    #: what is wrong, by what was checked
    problems: dict[str, list[str]]
    #: seconds from a process' start until it worked, by role, with all starting at once
    boot_s: dict[str, float]
    deaths: list[Death]
    submitted: list[Submitted]
    kills: list[str]
    #: records of outcomes that came twice, and of attempts that were over
    num_duplicates: int
    num_requeued: int
    #: jobs that were run undisturbed and left out: their texts hang on rounding
    num_unfair: int
    undisturbed_s: float
    disturbed_s: float
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def passed(self) -> bool:
        return not any(self.problems.values())


class Runner:
    """Runs one campaign on a system that has just been entered."""

    def __init__(self, system: Field, options: Options, say: Say) -> None:
        self._system = system
        self._options = options
        self._say = say
        self._watch = Watch(system)
        self._strikes: list[Strike] = []
        self._unrecovered: list[str] = []

    def run(self) -> Campaign:
        """From the start of the processes to the checks."""
        self._database().close()  # makes the tables before several processes want to
        self._system.start_workers()
        with self._watch:
            boot_s = self._wait_up()
            self._say(f"all processes work: {', '.join(f'{name} {s:.0f} s' for name, s in boot_s.items())}")
            began = time.time()
            chosen, undisturbed, num_unfair = self._undisturbed()
            undisturbed_s = time.time() - began
            self._say(f"{len(chosen)} jobs ran undisturbed in {undisturbed_s:.0f} s, {num_unfair} left out")
            self._set_links(LinkShape.leg(RTT_MS))
            submissions = self._disturb(chosen)
            problems = self._at_rest()
            return self._campaign(chosen, undisturbed, submissions, problems, boot_s, num_unfair, undisturbed_s)

    # -- the parts ----------------------------------------------------------------------------------------------

    def _wait_up(self) -> dict[str, float]:
        """Seconds until each role worked."""
        up: dict[str, float] = {}

        def all_up() -> bool:
            if not self._watch.samples:
                return False
            sample = self._watch.samples[-1]
            for role in ("bookkeeper", "tail", "head"):
                if role not in up and not any(text.startswith(role) for text in sample.unwell):
                    names = [name for name in self._system.workers if name.startswith(role)]
                    up[role] = sample.at - min(self._system.started_at[name] for name in names)
            return not sample.unwell

        self._system.wait_until(all_up, "working system", START_S)
        return up

    def _undisturbed(self) -> tuple[list[dict[str, Any]], dict[str, str | None], int]:
        """The fair jobs, their texts, and how many were not fair."""
        options = self._options
        self._set_links(LinkShape())
        count = int(options.jobs * (1 + SPARE)) + 3
        lines = requests(count, options.seed, min_tokens=options.min_tokens, max_tokens=options.max_tokens)
        name = self._system.submit(lines, "--name", "undisturbed")
        report = self._system.wait_for(name, timeout_s=UNDISTURBED_S)
        assert report.counts.completed == count, f"the undisturbed run failed: {report.counts}"
        with closing(self._database()) as database:
            rows = list(iterate_results(database, name))
            fair = {row.custom_id for row in Judge(Path(self._system.model)).fair(database, rows)}
        chosen = [line for line in lines if line["custom_id"] in fair][: options.jobs]
        assert len(chosen) == options.jobs, f"only {len(fair)} of {count} jobs are fair"
        return chosen, {row.custom_id: text_of(row) for row in rows}, count - len(fair)

    def _disturb(self, chosen: list[dict[str, Any]]) -> Submissions:
        """All faults, one after the other, while the jobs are submitted, run and recorded."""
        options = self._options
        faults = draw(options.seed, options.faults, options.kinds)
        portions = [chosen[start : start + options.portion] for start in range(0, len(chosen), options.portion)]
        submissions = Submissions(self._system, portions, lambda number: self._wants(number, len(portions)))
        striker = Striker(self._system, submissions, lambda: self._watch.samples[-1].booting)
        submissions.start()
        for fault in faults:
            time.sleep(fault.pause_s)
            if fault.kind in NEED_ALL:
                self._wait_for_all()
            self._wait_for_work(submissions)
            self._strike(striker, fault)
        self._wait_for_all()
        submissions.finish(DRAIN_S)
        self._system.wait_until(self._all_ended, "end of all jobs", DRAIN_S)
        return submissions

    def _wants(self, number: int, num_portions: int) -> bool:
        """Whether portion `number` is due: none waits long, and they last as long as the faults."""
        due = (len(self._strikes) + 3) / (self._options.faults + 1) * num_portions
        return number < min(due, num_portions) and len(self._watch.samples[-1].open_jobs) < self._options.portion

    def _wait_for_all(self) -> None:
        """Until what still starts has come up."""
        deadline = time.monotonic() + START_S
        while self._watch.samples[-1].unwell:
            if time.monotonic() > deadline:
                self._unrecovered.append(f"after {START_S:g} s: {'; '.join(self._watch.samples[-1].unwell)}")
                return
            time.sleep(0.2)

    def _wait_for_work(self, submissions: Submissions) -> None:
        """A fault shall strike while jobs are open, as long as there are any to submit."""
        deadline = time.monotonic() + WORK_S
        while time.monotonic() < deadline and not self._watch.samples[-1].open_jobs:
            if not self._wants(len(submissions.done), submissions.num_portions):
                return
            time.sleep(0.1)

    def _strike(self, striker: Striker, fault: Fault) -> None:
        num_open = len(self._watch.samples[-1].open_jobs)
        began = time.time()
        try:
            strike = striker.strike(fault)
        except (OSError, RuntimeError, LookupError, subprocess.SubprocessError, redis.RedisError) as error:
            self._unrecovered.append(f"fault {fault.number} ({fault.kind}) could not be done: {error!r}")
            strike = Strike(fault, "could not be done", began, time.time())
        took_s = self._settle(strike.fault, strike.ended)
        if fault.kind is Kind.SWAP_TAIL:
            strike = replace(strike, until=time.time())
        self._strikes.append(replace(strike, num_open=num_open))
        self._say(
            f"{fault.number:>3} {fault.kind:<18} {strike.hit:<44} {num_open:>3} jobs open, settled after {took_s:.1f} s"
        )
        if fault.kind is Kind.SWAP_TAIL:
            self._release()

    def _release(self) -> None:
        """Let a tail that was kept away start, and wait until that is seen: it is not the next fault's doing."""
        self._system.release()
        since = time.time()
        while self._watch.samples[-1].at < since + LOOK_S:
            time.sleep(0.1)

    def _settle(self, fault: Fault, since: float) -> float:
        """Wait until all has worked for a while; seconds since `since`, a Unix time."""
        while time.time() - since < GIVE_UP_S:
            time.sleep(0.2)
            bad = last_bad(self._watch.samples, since)
            if self._watch.samples[-1].at - bad >= self._options.settle_s:
                return bad - since
        sample = self._watch.samples[-1]
        self._unrecovered.append(
            f"fault {fault.number} ({fault.kind}): not recovered after {GIVE_UP_S:g} s: "
            f"{'; '.join(sample.bad)} {sorted(sample.stranded)}"
        )
        return GIVE_UP_S

    def _all_ended(self) -> bool:
        return len(self._strikes) == self._options.faults and not self._watch.samples[-1].open_jobs

    def _at_rest(self) -> dict[str, list[str]]:
        """What is left, once there was time for it to go."""
        deadline = time.monotonic() + REST_S
        while True:
            problems = self._left()
            if not any(problems.values()) or time.monotonic() > deadline:
                return problems
            time.sleep(1.0)

    def _left(self) -> dict[str, list[str]]:
        left, system = remains.collect(self._system), self._system
        return {
            "no slot leaked": remains.leaked_slots(left.heads),
            "no lease, message or record leaked": remains.leaked_queue_keys(
                left.queue, system.heads_names, left.num_pending
            ),
            "no stream of the relay leaked": remains.leaked_wire_keys(left.wire, left.tails),
            "no socket leaked": remains.leaked_sockets(left.sockets, len(system.heads_names)),
            "no process leaked": remains.leaked_processes(left.processes, system.workers),
        }

    # -- the end ------------------------------------------------------------------------------------------------

    def _campaign(
        self,
        chosen: list[dict[str, Any]],
        undisturbed: dict[str, str | None],
        submissions: Submissions,
        left: dict[str, list[str]],
        boot_s: dict[str, float],
        num_unfair: int,
        undisturbed_s: float,
    ) -> Campaign:
        ids = [line["custom_id"] for line in chosen]
        rows = self._rows()
        samples = [sample for sample in self._watch.samples if sample.at >= self._strikes[0].began]
        measured = measure(self._strikes, samples, [row.recorded_at for row in rows if row.recorded_at is not None])
        results = self._results(submissions)
        problems = {
            "every job recorded exactly once, completed": checks.recorded_once(ids, rows),
            "every job once among the results": checks.results_complete(ids, results),
            "every text equal to the undisturbed run's": checks.same_texts(
                {name: undisturbed[name] for name in ids}, {row.custom_id: text_of(row) for row in rows}
            ),
            "every job with somebody within the recovery time": checks.jobs_recovered(
                measured, self._options.recovery_s
            ),
            "every process at work within the recovery time": [
                *checks.processes_recovered(measured, boot_s, self._options.recovery_s),
                *self._unrecovered,
            ],
            "no process ended by itself": checks.nobody_died_unasked(self._system.deaths),
            "every submission came through": submissions.problems,
            **left,
        }
        return Campaign(
            options=self._options,
            measured=measured,
            problems=problems,
            boot_s=boot_s,
            deaths=list(self._system.deaths),
            submitted=submissions.done,
            kills=submissions.kills,
            num_duplicates=sum(row.duplicate_records + row.stale_records for row in rows),
            num_requeued=self._system.num_requeued,
            num_unfair=num_unfair,
            undisturbed_s=undisturbed_s,
            disturbed_s=time.time() - self._strikes[0].began,
        )

    def _rows(self) -> list[JobRow]:
        """The jobs of all disturbed batches."""
        with closing(self._database()) as database:
            with database.read() as connection:
                query = select(batch.c.id).where(batch.c.name.like("chaos-%"))
                ids = list(connection.execute(query).scalars())
            return [row for batch_id in ids for row in iterate_results(database, batch_id)]

    def _results(self, submissions: Submissions) -> list[checks.Result]:
        """What `shardq results` says of every batch."""
        found = []
        # in this process: a call of the command costs seconds, and these look at a database at rest
        shardq = Shardq(self._system.directory, self._system.environment)
        for number in range(len(submissions.done)):
            output = shardq("results", name_of(number), "--format", "jsonl")
            if output.exit_code not in (ExitCode.OK, ExitCode.JOBS_FAILED):
                submissions.problems.append(f"results of {name_of(number)}: {output.stderr.strip()}")
            lines = [json.loads(line) for line in output.stdout.splitlines()]
            found += [checks.Result(line["custom_id"], line["error"] is None) for line in lines]
        return found

    def _database(self) -> Database:
        return Database.open(self._system.environment["SHARDQ_DATABASE_URL"])

    def _set_links(self, shape: LinkShape) -> None:
        self._system.shape_links(shape)


def last_bad(samples: Sequence[Sample], since: float) -> float:
    """Unix time of the last sample after `since` in which something did not work, or a job had been with nobody
    for too long; `since` if there is none.
    """
    window = [sample for sample in samples if sample.at >= since - ON_ITS_WAY_S]
    bad = max((sample.at for sample in window if sample.bad and sample.at >= since), default=since)
    waits = [stretch.end for stretch in stretches(window)] if window else []
    return max([since, bad, *waits])


def run(directory: Path, model: Path, options: Options, say: Say) -> Campaign:
    """One campaign in a directory of its own; what the processes wrote stays in `processes.log` there."""
    with Field(directory, model, num_heads=options.num_heads, link=LinkShape()) as system:
        return Runner(system, options, say).run()
