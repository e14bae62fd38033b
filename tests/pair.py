"""A head and a tail in this process, joined by the in-memory relay, and the uncut model they must equal."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from relay.memory import MemoryHub, MemoryRelay
from relay.profile import Profile
from relay.transport import TailInfo
from tasks.generation import GenerationRequest, GenerationTask, Outcome
from tests.processors import SharedNoise, library_processors
from workers.engine.loader import load_head, load_tail
from workers.engine.quantization import Quantization, library_config
from workers.engine.shard import HeadShard, TailShard
from workers.engine.tokenizer import end_ids, load_tokenizer
from workers.head.courier import Courier
from workers.head.drafters import Drafter
from workers.head.engine import HeadEngine
from workers.head.ensemble import Ensemble
from workers.head.jobs import Job
from workers.head.options import EngineOptions
from workers.head.prompts import PromptReader
from workers.head.session import HeadOffer, TailSearch
from workers.tail.worker import TailWorker
from workers.whole.link import DirectRelay

#: tokens a row brings at most in these tests
MAX_QUERY = 64
#: an id that no model gives
NO_TOKEN = 2**31 - 1
#: lanes that an engine may choose from
MAX_LANES = 4


@dataclass(frozen=True)
class Halves:
    """Both halves of a model in memory; engines for many settings can be made on them, one after the other."""

    directory: Path
    head: HeadShard
    tail: TailShard
    prompts: PromptReader

    @classmethod
    def load(
        cls,
        directory: Path,
        split: int,
        *,
        slots: int,
        max_length: int,
        quantization: Quantization = "none",
        graphs: bool = False,
    ) -> Halves:
        sizes: dict[str, Any] = {"slots": slots, "max_length": max_length, "max_query": MAX_QUERY}
        head = load_head(directory, split, **sizes, quantization=quantization, graphs=graphs)
        tail = load_tail(directory, split, **sizes, quantization=quantization, graphs=graphs)
        tokenizer = load_tokenizer(directory)
        prompts = PromptReader(
            tokenizer=tokenizer,
            eos=end_ids(directory, tokenizer),
            vocab_size=head.vocab_size,
            context=max_length,
        )
        return cls(directory, head, tail, prompts)


class Line(deque[Job | Ensemble]):
    """Jobs on their way to an engine, alone or as the choices of a task."""

    def take(self) -> Ensemble | None:
        if not self:
            return None
        arrived = self.popleft()
        return Ensemble((arrived,)) if isinstance(arrived, Job) else arrived

    @property
    def num_waiting(self) -> int:
        return len(self)


class Outcomes:
    """Collects what becomes of jobs."""

    def __init__(self) -> None:
        self.finished: dict[str, Outcome] = {}
        self.begun: list[str] = []

    def started(self, task_id: str) -> None:
        self.begun.append(task_id)

    def progress(self, task_id: str, num_tokens: int, tps: float | None) -> None: ...

    def finish(self, task_id: str, outcome: Outcome) -> None:
        assert task_id not in self.finished, "a job ended twice"
        self.finished[task_id] = outcome

    def hand_back(self, task_id: str) -> None: ...


def options(
    *,
    slots: int,
    draft_length: int | Literal["auto"] = "auto",
    lanes: int | Literal["auto"] = "auto",
    prefill_chunk: int = 32,
    prefix_reuse: bool = True,
    wire_dtype: str = "float32",
    whole: bool = False,
    drafts_apart: bool = False,
) -> EngineOptions:
    """An engine's options as tests vary them."""
    return EngineOptions(
        head_id="head",
        slots=slots,
        draft_length=draft_length,
        max_draft_length=16,
        lanes=num_lanes(lanes),
        adapt_lanes=lanes == "auto",
        prefill_chunk=prefill_chunk,
        prefix_reuse=prefix_reuse,
        wire_dtype=wire_dtype,
        whole=whole,
        prefill_per_turn=128 if whole else 1,
        drafts_apart_on="cpu" if drafts_apart else None,
    )


def num_lanes(lanes: int | Literal["auto"]) -> int:
    """Lanes of the link for the setting `lanes`."""
    return MAX_LANES if lanes == "auto" else lanes


def generate(
    halves: Halves,
    tasks: Sequence[GenerationTask],
    drafter: Drafter,
    *,
    draft_length: int | Literal["auto"],
    concurrency: int,
    lanes: int | Literal["auto"] = 1,
    prefill_chunk: int = 32,
    prefix_reuse: bool = True,
    wire_dtype: str = "float32",
    whole: bool = False,
    drafts_apart: bool = False,
) -> list[Outcome]:
    """Run the tasks through head and tail, at most `concurrency` at a time; outcomes in the tasks' order.

    `whole`: as `shardq head --whole` runs both; `drafts_apart`: as with a drafter on another device.
    """
    outcomes = Outcomes()
    engine = HeadEngine(
        halves.head,
        drafter,
        Line(halves.prompts.read_all(task) for task in tasks),
        outcomes,
        options(
            slots=concurrency,
            draft_length=draft_length,
            lanes=lanes,
            prefill_chunk=prefill_chunk,
            prefix_reuse=prefix_reuse,
            wire_dtype=wire_dtype,
            whole=whole,
            drafts_apart=drafts_apart,
        ),
    )
    joined = whole_session if whole else session
    with closing(engine), joined(halves, concurrency, num_lanes(lanes)) as courier:
        engine.open(courier)
        while len(outcomes.finished) < len(tasks):
            engine.step()
    return [outcomes.finished[task.task_id] for task in tasks]


@contextmanager
def session(halves: Halves, slots: int, lanes: int) -> Iterator[Courier]:
    """A tail in a thread, found and leased as in production."""
    hub, stop = MemoryHub(), threading.Event()
    info = tail_info(halves, slots)
    tail = threading.Thread(target=TailWorker(MemoryRelay(hub), info, halves.tail).serve, args=(stop,), daemon=True)
    tail.start()
    offer = HeadOffer("head", info.profile, 1, slots, lanes, MAX_QUERY)
    found = TailSearch(MemoryRelay(hub), offer).wait(threading.Event(), 20)
    assert found is not None
    try:
        yield Courier(found.link)
    finally:
        found.close()
        stop.set()
        tail.join(10)


@contextmanager
def whole_session(halves: Halves, slots: int, lanes: int) -> Iterator[Courier]:
    """The tail in the head's own thread, as with `shardq head --whole`."""
    info = tail_info(halves, slots)
    offer = HeadOffer("head", info.profile, 1, slots, lanes, MAX_QUERY)
    found = TailSearch(DirectRelay(info, halves.tail), offer).find(threading.Event())
    assert found is not None
    yield Courier(found.link)
    found.close()


def tail_info(halves: Halves, slots: int) -> TailInfo:
    """What the tail of these halves announces."""
    profile = Profile("f", "float32", "none", "float32", False, halves.head.max_length)
    return TailInfo("tail-00000000", profile, 1, slots, MAX_QUERY, 0.0)


@dataclass(frozen=True)
class Reference:
    """What the uncut model says, and how clearly: the smallest distance between its best two scores."""

    tokens: tuple[int, ...]
    gap: float
    #: [tokens, vocab], of the model's own logits
    logprobs: torch.Tensor


def uncut_model(directory: Path, quantization: Quantization = "none") -> Any:
    """The library's own causal model in float32, quantised by the library where asked for."""
    if quantization == "none":
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    # both sides compute in float32, also on a CPU on which bitsandbytes would rather take bfloat16
    with patch("bitsandbytes.nn.modules.has_avx512bf16", lambda: False):
        return AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            quantization_config=library_config(quantization, torch.float32),
            device_map="cpu",
        )


class UncutModel:
    """The library's own model in one piece: `generate`, which takes the best token after everything done to logits."""

    def __init__(self, directory: Path, prompts: PromptReader, quantization: Quantization = "none") -> None:
        self._model = uncut_model(directory, quantization)
        self._prompts = prompts

    @torch.inference_mode()
    def answer(self, task: GenerationTask) -> Reference:
        job = self._prompts.read(task)
        prompt = torch.tensor([job.tokens])
        request = task.request
        ending = [*request.stop_token_ids, *(() if request.ignore_eos else self._prompts.eos)]
        processors = library_processors(request, prompt.shape[1], ending)
        if request.temperature > 0:
            processors.append(SharedNoise(job.sampling))
        # not the checkpoint's sampling defaults
        config = type(self._model.generation_config)(
            do_sample=False,
            max_new_tokens=job.max_tokens,
            # for None it would take the checkpoint's
            eos_token_id=ending or [NO_TOKEN],
            pad_token_id=0,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
        result = self._model.generate(
            prompt, generation_config=config, attention_mask=torch.ones_like(prompt), logits_processor=processors
        )
        tokens = tuple(result.sequences[0, prompt.shape[1] :].tolist())
        logprobs = torch.cat(result.logits).float().log_softmax(-1)
        return Reference(tokens, min(_gap(scores[0]) for scores in result.scores), logprobs)


def _gap(scores: torch.Tensor) -> float:
    best, second = scores.topk(2).values.tolist()
    return float(best - second)


def tasks_for(requests: Sequence[GenerationRequest]) -> list[GenerationTask]:
    """One task each, in order."""
    return [
        GenerationTask(f"job{number}", 1, "batch", f"c{number}", "m", request)
        for number, request in enumerate(requests)
    ]
