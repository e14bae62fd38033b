"""Jobs through one engine and a tail, wherever that is, without Celery and queue: their texts and their speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from benchmarks.rig import Record
from relay.transport import HeadRelay, TailInfo
from tasks.generation import GenerationRequest, GenerationTask
from workers.engine.shard import HeadShard, TailShard
from workers.engine.tokenizer import end_ids, load_tokenizer
from workers.head.courier import Courier
from workers.head.drafters import Drafter
from workers.head.engine import HeadEngine
from workers.head.intake import Intake
from workers.head.options import EngineOptions
from workers.head.prompts import PromptReader
from workers.head.session import TailSearch
from workers.head.worker import engine_options, offer
from workers.served import ServedModel
from workers.settings import HeadSettings
from workers.whole.link import DirectRelay

#: seconds a tail may take to be there, and one frame to be answered
_TAIL_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a run's jobs."""

    wall_s: float
    #: of this process, all of its threads
    cpu_s: float
    num_rounds: int
    texts: list[tuple[int, ...]]

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all jobs."""
        return sum(map(len, self.texts))

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens / wall time, prefill included."""
        return self.num_tokens / self.wall_s


@dataclass(frozen=True, slots=True)
class Head:
    """A model's first half in this process."""

    served: ServedModel
    shard: HeadShard

    def run(
        self,
        requests: Sequence[GenerationRequest],
        settings: HeadSettings,
        relay: HeadRelay,
        drafter: Drafter,
        options: EngineOptions | None = None,
    ) -> Ran:
        """All requests, there from the start. `options`: other ones than the settings give. Raises RuntimeError."""
        tokenizer = load_tokenizer(self.served.directory)
        prompts = PromptReader(
            tokenizer=tokenizer,
            eos=end_ids(self.served.directory, tokenizer),
            vocab_size=self.shard.vocab_size,
            context=self.served.profile.context,
        )
        intake, record = Intake(prompts, settings.head_id), Record()
        for number, request in enumerate(requests):
            intake.deliver(GenerationTask(f"job{number}", 1, "bench", f"c{number}", "m", request))
        options = options or engine_options(settings, self.served.profile.wire_dtype)
        engine = HeadEngine(self.shard, drafter, intake, record, options)
        with closing(engine), self._courier(settings, relay) as courier:
            began, cpu_began = time.perf_counter(), time.process_time()
            engine.open(courier)
            while len(record.outcomes) < len(requests):
                engine.step()
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        outcomes = [record.outcomes[f"job{number}.1"] for number in range(len(requests))]
        failed = [outcome.failure_message for outcome in outcomes if outcome.failure is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} jobs failed: {failed[0]}")
        num_rounds = sum(outcome.metrics.rounds for outcome in outcomes if outcome.metrics)
        return Ran(wall_s, cpu_s, num_rounds, [outcome.token_ids for outcome in outcomes])

    @contextmanager
    def _courier(self, settings: HeadSettings, relay: HeadRelay) -> Iterator[Courier]:
        search = TailSearch(relay, offer(settings, self.served))
        session = search.wait(threading.Event(), _TAIL_TIMEOUT_S)
        if session is None:
            raise RuntimeError(f"no tail: {search.obstacle}")
        try:
            yield Courier(session.link, resend_after_s=_TAIL_TIMEOUT_S, give_up_after_s=_TAIL_TIMEOUT_S)
        finally:
            session.close()


def whole_relay(served: ServedModel, tail: TailShard) -> DirectRelay:
    """The way to a tail in this process."""
    info = TailInfo("bench", served.profile, served.split, tail.slots, tail.max_query, time.time())
    return DirectRelay(info, tail)
