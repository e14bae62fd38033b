"""A head and a tail an ocean apart, on one machine: what `benchmarks.wan` measures with.

The tail is `shardq tail` in a process of its own, the head's engine runs in ours, the relay's server between them;
each is at the far end of a simulated link. There are no Celery and no queue: jobs are handed to the engine.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import IO, Any

import redis

from benchmarks.link_simulator import LinkProcess, LinkShape, link_simulator_process
from cli.processes import child_environment, shardq_argv
from relay.embedded import EmbeddedRedis
from relay.messages import Accepted, Prefill, Round, Verdict, token_bytes
from relay.streams import RedisRelay
from relay.transport import HeadLink
from tasks.generation import GenerationRequest, GenerationTask, Outcome
from workers.engine.shard import HeadShard
from workers.engine.source import Part
from workers.engine.tokenizer import end_ids, load_tokenizer
from workers.head.courier import Answered, Courier, Frame
from workers.head.drafters import Drafter, DraftRow, Proposal, make_drafter
from workers.head.engine import HeadEngine
from workers.head.intake import Intake
from workers.head.prompts import PromptReader
from workers.head.session import HeadOffer, TailSearch
from workers.head.worker import engine_options
from workers.pauses import exempt_loaded
from workers.served import ServedModel
from workers.settings import HeadSettings

#: seconds a tail may take to load its half
_TAIL_TIMEOUT_S = 120.0
#: seconds for everything under way to arrive after a change of the links
_SETTLE_S = 0.3
#: most tokens a row brings in these measurements
MAX_QUERY = 64


class SentinelDrafter:
    """Drafts tokens that are never right: every round carries `limit` drafts and commits one token."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [Proposal((0,) * max(row.limit, 0), (1.0,) * max(row.limit, 0)) for row in rows]

    def begin(self, slot: int) -> None: ...

    def end(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Way:
    """How jobs are run. None: shardq's own default."""

    slots: int
    rtt_ms: float
    #: of each hop and direction; None: unlimited
    mbit_s: float | None = None
    #: a drafter of `workers.head.drafters`, or "sentinel"
    drafter: str | None = None
    draft_length: int | None = None
    lanes: int | None = None
    prefix_reuse: bool = True
    #: directory of the model that drafts, for `drafter` "model"
    drafter_model: Path | None = None

    @classmethod
    def one_at_a_time(cls, rtt_ms: float, draft_length: int) -> Way:
        """The prototype's method: one prompt, one fixed draft length, nothing overlaps."""
        drafter = "ngram" if draft_length else "none"
        return cls(slots=1, rtt_ms=rtt_ms, drafter=drafter, draft_length=draft_length, lanes=1, prefix_reuse=False)

    def settings(self) -> HeadSettings:
        """The head's settings for this way."""
        own: dict[str, Any] = {
            "draft_length": self.draft_length,
            "lanes": self.lanes,
            "prefix_reuse": self.prefix_reuse,
            "drafter": None if self.drafter == "sentinel" else self.drafter,
        }
        chosen = {name: value for name, value in own.items() if value is not None}
        return HeadSettings(model="-", head_id="bench", slots=self.slots, **chosen)


@dataclass(slots=True)
class Tally:
    """What frames of one kind carried, as far as they were answered."""

    frames: int = 0
    rows: int = 0
    tokens: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    tail_s: float = 0.0

    def count(self, answered: Answered, tokens: int) -> None:
        self.frames += 1
        self.rows += len(answered.verdict.rows)
        self.tokens += tokens
        self.bytes_up += answered.bytes_up
        self.bytes_down += answered.bytes_down
        self.tail_s += answered.verdict.tail_s


class MeasuringCourier(Courier):
    """Keeps an account of the traffic."""

    def __init__(self, link: HeadLink) -> None:
        super().__init__(link)
        self.prefill, self.rounds = Tally(), Tally()
        #: (`time.perf_counter`, tokens) of every round, when it was sent
        self.sent: list[tuple[float, int]] = []
        #: (`time.perf_counter`, tokens) of every verdict
        self.commits: list[tuple[float, int]] = []
        #: `time.perf_counter` of every round that a job's row was in, by slot and generation
        self.turns: dict[tuple[int, int], list[float]] = {}
        #: rounds' rows that brought drafts, and those of them whose drafts were all accepted
        self.num_drafted_rows = self.num_whole_drafts = 0

    def send(self, lane: int, frame: Frame) -> int:
        if isinstance(frame, Round):
            now = time.perf_counter()
            self.sent.append((now, frame.hidden.shape[0]))
            for row in frame.rows:
                self.turns.setdefault((row.slot, row.generation), []).append(now)
        return super().send(lane, frame)

    def receive(self, timeout_s: float) -> Answered | None:
        answered = super().receive(timeout_s)
        if answered is not None:
            self._count(answered)
        return answered

    def _count(self, answered: Answered) -> None:
        frame = answered.frame
        if isinstance(frame, Prefill | Round):
            tally = self.prefill if isinstance(frame, Prefill) else self.rounds
            tally.count(answered, frame.hidden.shape[0])
        if isinstance(frame, Round):
            self._count_drafts(frame, answered.verdict)
        num_tokens = sum(len(row.tokens) for row in answered.verdict.rows if isinstance(row, Accepted))
        self.commits.append((time.perf_counter(), num_tokens))

    def _count_drafts(self, frame: Round, verdict: Verdict) -> None:
        for row, answer in zip(frame.rows, verdict.rows, strict=True):
            if row.draft and isinstance(answer, Accepted):
                self.num_drafted_rows += 1
                self.num_whole_drafts += answer.accepted == len(row.draft)


@dataclass(slots=True)
class Record:
    """What became of the jobs of a run, and when; the engine's `Report`."""

    began: float = 0.0
    #: seconds since `began`, by task id
    started_s: dict[str, float] = field(default_factory=dict)
    finished_s: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def started(self, task_id: str) -> None:
        self.started_s.setdefault(task_id, time.perf_counter() - self.began)

    def progress(self, task_id: str, num_tokens: int, tps: float | None) -> None: ...

    def finish(self, task_id: str, outcome: Outcome) -> None:
        self.finished_s[task_id] = time.perf_counter() - self.began
        self.outcomes[task_id] = outcome

    def hand_back(self, task_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Result:
    """One run. Times in seconds since the first job could start."""

    wall_s: float
    #: of our process, the head
    cpu_s: float
    outcomes: list[Outcome]
    record: Record
    traffic: MeasuringCourier
    #: resident memory of our process and memory in use by the relay's server, at the end
    head_mb: float
    redis_mb: float

    @property
    def num_tokens(self) -> int:
        return sum(len(outcome.token_ids) for outcome in self.outcomes)

    @property
    def tokens_per_s(self) -> float:
        """All completion tokens / wall time, prefill, ramp and drain included."""
        return self.num_tokens / self.wall_s

    @property
    def texts(self) -> list[tuple[int, ...]]:
        return [outcome.token_ids for outcome in self.outcomes]

    def mean(self, figure: str) -> float | None:
        """The mean of one of the outcomes' metrics over the jobs that have it."""
        values = [getattr(o.metrics, figure) for o in self.outcomes if o.metrics is not None]
        return fmean(v for v in values if v is not None) if any(v is not None for v in values) else None


class Rig:
    """One model, cut in the middle, its tail running; jobs can be run in many ways, one after the other."""

    def __init__(
        self,
        served: ServedModel,
        shard: HeadShard,
        relay: RedisRelay,
        server: EmbeddedRedis,
        links: Sequence[LinkProcess],
    ) -> None:
        self._served = served
        self._shard = shard
        self._relay = relay
        self._server = server
        self._links = links
        tokenizer = load_tokenizer(served.directory)
        self._prompts = PromptReader(
            tokenizer=tokenizer,
            eos=end_ids(served.directory, tokenizer),
            vocab_size=shard.vocab_size,
            context=served.profile.context,
        )

    @property
    def bytes_per_token(self) -> int:
        """Hidden state of one token on the wire."""
        return token_bytes(self._shard.hidden_size, self._served.profile.wire_dtype)

    def lateness_ms(self, rtt_ms: float) -> float:
        """How much longer than `rtt_ms` the links themselves take, there and back: the median of some PINGs."""
        self._reshape(rtt_ms, None)
        with closing(redis.Redis.from_url(self._links[0].url)) as client:
            client.ping()
            times = sorted(_took(client.ping) for _ in range(20))
        return 2 * 1000 * times[10] - rtt_ms

    def run(self, requests: Sequence[GenerationRequest], way: Way) -> Result:
        """All the requests, in this order, as jobs that are there from the start."""
        self._reshape(way.rtt_ms, way.mbit_s)
        settings = way.settings()
        intake, record = Intake(self._prompts, settings.head_id), Record()
        for number, request in enumerate(requests):
            intake.deliver(GenerationTask(f"job{number}", 1, "bench", f"c{number}", "m", request))
        engine = self._engine(settings, way, intake, record)
        with self._session(settings) as courier:
            record.began, cpu_began = time.perf_counter(), time.process_time()
            engine.open(courier)
            while len(record.outcomes) < len(requests):
                engine.step()
            wall_s, cpu_s = time.perf_counter() - record.began, time.process_time() - cpu_began
        outcomes = [record.outcomes[f"job{number}.1"] for number in range(len(requests))]
        failed = [outcome.failure_message for outcome in outcomes if outcome.failure is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} jobs failed: {failed[0]}")
        return Result(wall_s, cpu_s, outcomes, record, courier, _resident_mb(), self._redis_mb())

    def _engine(self, settings: HeadSettings, way: Way, intake: Intake, record: Record) -> HeadEngine:
        options = engine_options(settings, self._served.profile.wire_dtype)
        return HeadEngine(self._shard, self._drafter(settings, way), intake, record, options)

    def _drafter(self, settings: HeadSettings, way: Way) -> Drafter:
        if way.drafter == "sentinel":
            return SentinelDrafter()
        return make_drafter(
            settings.drafter,
            target=self._served.directory,
            drafter=way.drafter_model,
            dtype=settings.dtype,
            device=settings.device,
            slots=settings.num_slots,
            max_length=self._served.profile.context,
        )

    @contextmanager
    def _session(self, settings: HeadSettings) -> Iterator[MeasuringCourier]:
        offer = HeadOffer(
            head=settings.head_id,
            profile=self._served.profile,
            split=self._served.split,
            slots=settings.num_slots,
            lanes=settings.link_lanes,
            max_query=MAX_QUERY,
        )
        search = TailSearch(self._relay, offer)
        session = search.wait(threading.Event(), _TAIL_TIMEOUT_S)
        if session is None:
            raise RuntimeError(f"no tail: {search.obstacle}")
        try:
            yield MeasuringCourier(session.link)
        finally:
            session.close()

    def _reshape(self, rtt_ms: float, mbit_s: float | None) -> None:
        for link in self._links:
            link.reshape(LinkShape.leg(rtt_ms, mbit_s))
        time.sleep(_SETTLE_S)

    def _redis_mb(self) -> float:
        with closing(redis.Redis.from_url(self._server.url, protocol=2)) as client:
            return int(client.info("memory")["used_memory"]) / 2**20


@contextmanager
def rig(model: Path, *, slots: int, max_length: int) -> Iterator[Rig]:
    """Start everything for a model: a server, two links, a tail process, the head's half in this process."""
    settings = HeadSettings(model=str(model), max_length=max_length)
    served = ServedModel.resolve(settings, Part.HEAD)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(EmbeddedRedis(directory / "redis"))
        head_leg = stack.enter_context(link_simulator_process(server.url, LinkShape()))
        tail_leg = stack.enter_context(link_simulator_process(server.url, LinkShape()))
        log = stack.enter_context((directory / "tail.log").open("w+"))
        stack.enter_context(tail_process(model, tail_leg.url, slots, max_length, log))
        shard = served.load_head(slots=slots, max_query=MAX_QUERY)
        relay = stack.enter_context(closing(RedisRelay(head_leg.url)))
        ready = Rig(served, shard, relay, server, (head_leg, tail_leg))
        warm_up = GenerationRequest("Warm up.", None, 0, 8, temperature=0.0)
        ready.run([warm_up] * 2, Way(slots=min(2, slots), rtt_ms=0))
        exempt_loaded()
        yield ready


@contextmanager
def tail_process(model: Path, url: str, slots: int, max_length: int, log: IO[str]) -> Iterator[int]:
    """`shardq tail` on the relay's server at `url`, until the block ends; its process id."""
    sizes = ("--slots", str(slots), "--max-length", str(max_length))
    argv = shardq_argv("tail", "--model", str(model), "--tail-name", "bench", "--relay-url", url, *sizes)
    process = subprocess.Popen(argv, env=child_environment({}), stdout=log, stderr=log)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def _took(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _resident_mb() -> float:
    """Of this process (Linux; 0 elsewhere)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0.0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
