"""Single pieces of a round, in this process: the draft loop, the head's half, the tail's half with verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.profiler import write_profile
from benchmarks.gpu.rows import Row
from benchmarks.gpu.timing import median_ms
from relay.messages import Accepted, Draft, Prefill, Round, Sampling, Tensor, Verdict
from workers.engine.loader import load_head, load_tail, load_whole
from workers.engine.shard import HeadShard, TailShard, WholeModel
from workers.engine.tensors import to_wire
from workers.head.drafters import DraftRow
from workers.head.drafters.model import ModelDrafter
from workers.head.forward import HeadForward
from workers.tail.engine import TailEngine

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.95)
#: most tokens a row brings in one forward of these measurements
MAX_QUERY = 256
#: positions that the caches have beyond those that are filled: rounds go on from each other
ROOM = 512

DRAFT_WANTED = {1: "≤ 7.5", 32: "≤ 9"}
HEAD_WANTED = {1: "≤ 2.3", 32: "≤ 5"}
TAIL_WANTED = {1: "≤ 2.8", 32: "≤ 6"}


def draft_rows(bench: Bench) -> Iterator[Row]:
    """K tokens for 1 and for many rows, from the embedding of the base token to the tokens on the host."""
    yield from _both_ways(bench, _drafting)


def head_rows(bench: Bench) -> Iterator[Row]:
    """The head's forward of K + 1 tokens a row, and the same with the way to the wire's bytes."""
    yield from _both_ways(bench, _head)


def tail_rows(bench: Bench) -> Iterator[Row]:
    """A round's verdict from the wire's bytes, and the tail's forward with LM head alone."""
    yield from _both_ways(bench, _tail)


def _both_ways(bench: Bench, work: Callable[[Bench, bool], Iterator[Row]]) -> Iterator[Row]:
    for graphs in (True,) if bench.quick else (True, False):
        yield from work(bench, graphs)
        bench.clear()


def _row(bench: Bench, row: Row, model: HeadShard | TailShard | WholeModel, work: Callable[[], object]) -> Row:
    """`row` with the time of `work` on `model`; only the way that is the default on a GPU has a target.

    RuntimeError if the model should record its computations and recorded none.
    """
    value = median_ms(work, bench.device, bench.effort)
    graphs = model.graphs is not None
    if model.graphs is not None and not len(model.graphs):
        raise RuntimeError(f"{row.work}: nothing was recorded")
    way = "graphs" if graphs else "eager"
    measured = replace(row, work=f"{row.work}, {way}", value=value, unit="ms", wanted=row.wanted if graphs else "")
    if bench.profile:
        write_profile(bench.out, f"{measured.section}-{measured.work}", work, bench.device)
    return measured


def _sizes(bench: Bench, slots: int) -> dict[str, int]:
    return {"slots": slots, "max_length": bench.sizes.cache + ROOM, "max_query": MAX_QUERY}


def _drafting(bench: Bench, graphs: bool) -> Iterator[Row]:
    sizes, shape = bench.sizes, bench.shapes.drafter
    model: WholeModel = bench.dummy(load_whole, shape, graphs=graphs, **_sizes(bench, sizes.rows))
    floor = bench.floor_ms(sizes.draft * _read_bytes(model))
    for num_rows in (1, sizes.rows):
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            drafter = ModelDrafter(model, num_tokens=shape.vocabulary)
            for slot in range(num_rows):
                drafter.begin(slot)
            rows = [DraftRow(slot, _text(slot, sizes.cache), sampling, sizes.draft) for slot in range(num_rows)]
            wanted = DRAFT_WANTED.get(num_rows, "") if name == "greedy" else ""
            work = f"{shape.name} K={sizes.draft}, {num_rows} × cache {sizes.cache}, {name}"
            yield _row(bench, Row("draft", work, None, wanted=wanted, floor=floor), model, _propose(drafter, rows))


def _read_bytes(half: HeadShard | WholeModel) -> int:
    """Bytes of the weights that a forward reads: of embeddings that are no LM head only some rows."""
    tied = half.config.tie_word_embeddings and isinstance(half, WholeModel)
    embeddings = half.vocab_size * half.hidden_size * half.dtype.itemsize
    return half.num_weight_bytes - (0 if tied else embeddings)


def _propose(drafter: ModelDrafter, rows: Sequence[DraftRow]) -> Callable[[], object]:
    return lambda: drafter.propose(rows)


def _text(slot: int, length: int) -> list[int]:
    return [(slot * 7 + place) % 250 for place in range(length)]


def _head(bench: Bench, graphs: bool) -> Iterator[Row]:
    sizes, shape = bench.sizes, bench.shapes.target
    shard: HeadShard = bench.dummy(load_head, shape, shape.layers // 2, graphs=graphs, **_sizes(bench, sizes.rows))
    forward = HeadForward(shard, bench.dtype)
    floor = bench.floor_ms(_read_bytes(shard))
    for num_rows in (1, sizes.rows):
        for slot in range(num_rows):
            for start in range(0, sizes.cache, MAX_QUERY):
                chunk = _text(slot, sizes.cache)[start : start + MAX_QUERY]
                forward.run([chunk], [slot], [start])
        fed = [_text(slot + 1, sizes.draft + 1) for slot in range(num_rows)]
        slots, starts = list(range(num_rows)), [sizes.cache] * num_rows
        work = f"{shape.name} {num_rows} × {sizes.draft + 1}, cache {sizes.cache}"
        tensors = [torch.tensor(values) for values in (fed, slots, starts)]  # on the host, as the engine has them
        alone, wired = _forward(shard, tensors), _run(forward, fed, slots, starts)
        wanted = HEAD_WANTED.get(num_rows, "")
        yield _row(bench, Row("head", f"{work}, forward", None, wanted=wanted, floor=floor), shard, alone)
        yield _row(bench, Row("head", f"{work}, to the wire's bytes", None, floor=floor), shard, wired)


def _forward(shard: HeadShard | TailShard, tensors: Sequence[torch.Tensor]) -> Callable[[], object]:
    return lambda: shard.forward(*tensors)


def _run(forward: HeadForward, fed: list[list[int]], slots: list[int], starts: list[int]) -> Callable[[], object]:
    return lambda: forward.run(fed, slots, starts)


def _tail(bench: Bench, graphs: bool) -> Iterator[Row]:
    sizes, shape = bench.sizes, bench.shapes.target
    shard: TailShard = bench.dummy(load_tail, shape, shape.layers // 2, graphs=graphs, **_sizes(bench, sizes.rows))
    floor = bench.floor_ms(shard.num_weight_bytes)
    for num_rows in (1, sizes.rows):
        work = f"{shape.name} {num_rows} × {sizes.draft + 1}, cache {sizes.cache}"
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            rounds = Rounds(bench, shard, num_rows, sampling)
            wanted = TAIL_WANTED.get(num_rows, "") if name == "greedy" else ""
            row = Row("tail", f"{work}, verified, {name}", None, wanted=wanted, floor=floor)
            yield _row(bench, row, shard, rounds.answer)
        hidden = torch.randn(num_rows, sizes.draft + 1, shape.hidden, device=bench.device).to(shard.dtype)
        places = [torch.tensor(values) for values in (range(num_rows), [sizes.cache] * num_rows)]
        row = Row("tail", f"{work}, forward and LM head", None, floor=floor)
        yield _row(bench, row, shard, _with_logits(shard, [hidden, *places]))


def _with_logits(shard: TailShard, tensors: Sequence[torch.Tensor]) -> Callable[[], object]:
    return lambda: shard.logits(shard.forward(*tensors).flatten(0, 1))


class Rounds:
    """A tail's engine whose slots are filled, and frames for it. Hidden states are random, drafts always wrong."""

    def __init__(self, bench: Bench, shard: TailShard, num_rows: int, sampling: Sampling) -> None:
        self._bench = bench
        self._num_rows = num_rows
        self._hidden_size = shard.hidden_size
        self._engine = TailEngine(shard, slots=num_rows, max_query=MAX_QUERY)
        self._number = 0
        self._hidden = self._wire(num_rows * (bench.sizes.draft + 1))
        self._rows: list[Draft] = [self._filled(slot, sampling) for slot in range(num_rows)]

    def answer(self) -> Verdict:
        """The verdict on one round of all rows; the next round follows it."""
        verdict = self._engine.answer_all([Round(0, tuple(self._rows), self._hidden)])[0]
        self._rows = [self._following(row, answer) for row, answer in zip(self._rows, verdict.rows, strict=True)]
        return verdict

    def _filled(self, slot: int, sampling: Sampling) -> Draft:
        """Prefill a slot up to the cache length; the first row of its decoding."""
        length = self._bench.sizes.cache
        answer: object = None
        for number, start in enumerate(range(0, length, MAX_QUERY)):
            size = min(MAX_QUERY, length - start)
            last = start + size == length
            chunk = Prefill(0, slot, 0, number, start, 0, last, sampling, None, self._wire(size))
            answer = self._engine.answer(chunk).rows[0]
        return self._next(slot, -(-length // MAX_QUERY), length, answer)

    def _following(self, row: Draft, answer: object) -> Draft:
        accepted = answer.accepted if isinstance(answer, Accepted) else 0
        return self._next(row.slot, row.round + 1, row.position + 1 + accepted, answer)

    def _next(self, slot: int, number: int, position: int, answer: object) -> Draft:
        if not isinstance(answer, Accepted):
            raise RuntimeError(f"the tail did not accept the frame: {answer}")
        return Draft(slot, 0, number, position, answer.tokens[-1], (0,) * self._bench.sizes.draft)

    def _wire(self, tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(tokens)
        return to_wire(torch.randn(tokens, self._hidden_size, generator=generator), self._bench.dtype)
