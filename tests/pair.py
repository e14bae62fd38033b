"""A head and a tail in this process, joined by the in-memory relay, and the uncut model they must equal."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from relay.memory import MemoryHub, MemoryRelay
from relay.messages import Sampling
from relay.profile import Profile
from relay.transport import TailInfo
from tasks.generation import GenerationRequest, GenerationTask, Outcome
from workers.engine.loader import load_head, load_tail
from workers.engine.quantization import Quantization, library_config
from workers.engine.sampling import SamplingRows, choose, filtered
from workers.engine.shard import HeadShard, TailShard
from workers.engine.tokenizer import generation_eos, load_tokenizer
from workers.head.courier import Courier
from workers.head.drafters import Drafter
from workers.head.engine import HeadEngine
from workers.head.jobs import Job
from workers.head.options import EngineOptions
from workers.head.prompts import PromptReader
from workers.head.session import HeadOffer, TailSearch
from workers.tail.worker import TailWorker

#: tokens a row brings at most in these tests
MAX_QUERY = 64
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
        cls, directory: Path, split: int, *, slots: int, max_length: int, quantization: Quantization = "none"
    ) -> Halves:
        sizes: dict[str, Any] = {"slots": slots, "max_length": max_length, "max_query": MAX_QUERY}
        head = load_head(directory, split, **sizes, quantization=quantization)
        prompts = PromptReader(
            tokenizer=load_tokenizer(directory),
            eos=generation_eos(directory),
            vocab_size=head.vocab_size,
            context=max_length,
        )
        return cls(directory, head, load_tail(directory, split, **sizes, quantization=quantization), prompts)


class Line(deque[Job]):
    """Jobs on their way to an engine."""

    def take(self) -> Job | None:
        return self.popleft() if self else None

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
) -> list[Outcome]:
    """Run the tasks through head and tail, at most `concurrency` at a time; outcomes in the tasks' order."""
    outcomes = Outcomes()
    engine = HeadEngine(
        halves.head,
        drafter,
        Line(halves.prompts.read(task) for task in tasks),
        outcomes,
        options(
            slots=concurrency,
            draft_length=draft_length,
            lanes=lanes,
            prefill_chunk=prefill_chunk,
            prefix_reuse=prefix_reuse,
            wire_dtype=wire_dtype,
        ),
    )
    with session(halves, concurrency, num_lanes(lanes)) as courier:
        engine.open(courier)
        while len(outcomes.finished) < len(tasks):
            engine.step()
    return [outcomes.finished[task.task_id] for task in tasks]


@contextmanager
def session(halves: Halves, slots: int, lanes: int) -> Iterator[Courier]:
    """A tail in a thread, found and leased as in production."""
    hub, stop = MemoryHub(), threading.Event()
    profile = Profile("f", "float32", "none", "float32", False, halves.head.max_length)
    info = TailInfo("tail-00000000", profile, 1, slots, MAX_QUERY, 0.0)
    tail = threading.Thread(target=TailWorker(MemoryRelay(hub), info, halves.tail).serve, args=(stop,), daemon=True)
    tail.start()
    offer = HeadOffer("head", profile, 1, slots, lanes, MAX_QUERY)
    found = TailSearch(MemoryRelay(hub), offer).wait(threading.Event(), 20)
    assert found is not None
    try:
        yield Courier(found.link)
    finally:
        found.close()
        stop.set()
        tail.join(10)


@dataclass(frozen=True)
class Reference:
    """What the uncut model says, and how clearly: the smallest distance between its best two scores."""

    tokens: tuple[int, ...]
    gap: float


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
    """The library's own model in one piece: `generate` where greedy, the sampling rule step by step otherwise."""

    def __init__(self, directory: Path, prompts: PromptReader, quantization: Quantization = "none") -> None:
        self._model = uncut_model(directory, quantization)
        self._prompts = prompts

    @torch.inference_mode()
    def answer(self, task: GenerationTask) -> Reference:
        job = self._prompts.read(task)
        prompt = torch.tensor([job.tokens])
        if task.request.temperature == 0:
            return self._greedy(prompt, job.max_tokens)
        return self._sampled(prompt, job.max_tokens, job.sampling)

    def _greedy(self, prompt: torch.Tensor, max_tokens: int) -> Reference:
        # not the checkpoint's sampling defaults: its end-of-sequence ids only
        config = type(self._model.generation_config)(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(self._prompts.eos),
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        result = self._model.generate(prompt, generation_config=config, attention_mask=torch.ones_like(prompt))
        tokens = tuple(result.sequences[0, prompt.shape[1] :].tolist())
        return Reference(tokens, min(_gap(logits[0]) for logits in result.logits))

    def _sampled(self, prompt: torch.Tensor, max_tokens: int, sampling: Sampling) -> Reference:
        from workers.engine import noise

        rows, tokens, gap, fed, cache = SamplingRows.from_rows([sampling]), [], float("inf"), prompt, {}
        while len(tokens) < max_tokens:
            output = self._model(fed, use_cache=True, **cache)
            name = "cache" if "cache" in output else "past_key_values"
            cache = {name: output[name]}
            logits = output.logits[:, -1].float()
            position = torch.tensor([prompt.shape[1] + len(tokens)])
            token = int(choose(logits, rows, position))
            score = filtered(logits, rows) + noise.gumbel(rows.seed, position, logits.shape[-1])
            tokens.append(token)
            gap, fed = min(gap, _gap(score[0])), torch.tensor([[token]])
            if token in self._prompts.eos:
                break
        return Reference(tuple(tokens), gap)


def _gap(scores: torch.Tensor) -> float:
    best, second = scores.topk(2).values.tolist()
    return float(best - second)


def tasks_for(requests: Sequence[GenerationRequest]) -> list[GenerationTask]:
    """One task each, in order."""
    return [
        GenerationTask(f"job{number}", 1, "batch", f"c{number}", "m", request)
        for number, request in enumerate(requests)
    ]
