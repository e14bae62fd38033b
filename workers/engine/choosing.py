"""Choosing tokens for rows whose sampling parameters stand in buffers, as recorded computations need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from relay.messages import Sampling
from workers.engine.graphs import Graph, current
from workers.engine.processors import LogitRow, ProcessorRows, process
from workers.engine.sampling import SamplingRows, choose
from workers.engine.slottables import SlotTables


@dataclass(frozen=True, slots=True)
class Parameters:
    """How `n` rows of logits are chosen from, at fixed addresses: a computation reads what stands there by then."""

    temperature: Tensor  # float32 [n]
    top_k: Tensor  # int32 [n], 0 = off
    top_p: Tensor  # float32 [n], 1 = off
    min_p: Tensor  # float32 [n], 0 = off
    seed: Tensor  # int64 [n]
    repetition: Tensor  # float32 [n], 1 = off
    presence: Tensor  # float32 [n], 0 = off
    frequency: Tensor  # float32 [n], 0 = off
    free_from: Tensor  # int64 [n], 0 = off

    @classmethod
    def of(cls, rows: Sequence[Sampling], device: torch.device | str = "cpu") -> Parameters:
        """The parameters of these rows."""

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=column([row.temperature for row in rows]),
            top_k=column([row.top_k for row in rows], torch.int32),
            top_p=column([row.top_p for row in rows]),
            min_p=column([row.min_p for row in rows]),
            seed=column([row.seed for row in rows], torch.int64),
            repetition=column([row.repetition_penalty for row in rows]),
            presence=column([row.presence_penalty for row in rows]),
            frequency=column([row.frequency_penalty for row in rows]),
            free_from=column([row.free_from for row in rows], torch.int64),
        )

    @classmethod
    def greedy(cls, rows: int, device: torch.device | str) -> Parameters:
        """Rows without sampling."""
        return cls.of([GREEDY] * rows, device)

    @classmethod
    def news(cls, graph: Graph, rows: Sequence[Sampling]) -> dict[str, Tensor]:
        """The parameters of these rows for a run of the graph; nothing if they are those of its last run."""
        samplings = tuple(rows)
        if graph.remembered == samplings:
            return {}
        graph.remembered = samplings
        return cls.of(samplings).tensors()

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def repeat(self, times: int) -> Parameters:
        """Every row so often, in order."""
        return Parameters(**{name: value.repeat_interleave(times) for name, value in self.tensors().items()})


GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was chosen for every row."""

    tokens: Tensor  # int64 [n]
    #: softmax of the row's own logits at its token
    confidence: Tensor  # float32 [n]
    #: whether all its logits are numbers, and finite
    finite: Tensor  # bool [n]


class Needs(NamedTuple):
    """What some of the rows ask for, decided on the host: nobody pays for what no row needs."""

    #: tokens that are never chosen because they are unlikely
    cuts: bool
    penalties: bool
    bias: bool
    barred: bool

    @classmethod
    def of(cls, rows: Sequence[LogitRow]) -> Needs:
        """What these rows need."""
        samplings = [row.sampling for row in rows]
        return cls(
            cuts=any(row.top_k > 0 or row.top_p < 1.0 or row.min_p > 0.0 for row in samplings),
            penalties=any(row.has_penalties for row in samplings),
            bias=any(row.logit_bias for row in samplings),
            barred=any(row.is_barred for row in rows),
        )

    @property
    def processors(self) -> bool:
        """Whether logits are processed before a token is chosen."""
        return self.penalties or self.bias or self.barred


@dataclass(frozen=True, slots=True)
class Context:
    """What processors look at, beside a row's own parameters."""

    tables: SlotTables
    slots: Tensor  # int64 [n]
    #: int64 [n, K], the drafted tokens in front of each row, negative behind their end; None for none
    prefixes: Tensor | None


def choose_rows(
    logits: Tensor, rows: Parameters, positions: Tensor, needs: Needs, context: Context, *, num_tokens: int
) -> Chosen:
    """The token of every row by the rules of `workers.engine.processors` and `workers.engine.sampling`.

    Args:
        logits: [n, vocab], any float dtype.
        rows: their parameters.
        positions: int64 [n], absolute position of the token being chosen.
        needs: what is left out is ignored in every row.
        context: for the processors.
        num_tokens: ids from here on are padding and never chosen.
    """
    num_tokens = min(num_tokens, logits.shape[-1])
    if not needs.processors:
        return _choose(logits, rows, positions, num_tokens=num_tokens, cuts=needs.cuts)
    real = logits[:, :num_tokens].float()
    scores = process(real, _processors(rows, needs, context), context.tables, positions, context.prefixes)
    chosen = _choose(scores, rows, positions, num_tokens=num_tokens, cuts=needs.cuts, barred=needs.barred)
    return replace(chosen, finite=real.isfinite().all(dim=-1))


def choose_at(logits: Tensor, rows: Sequence[LogitRow], tables: SlotTables, prefixes: Tensor | None) -> Tensor:
    """The token of each of these rows, int64 [n], from float32 logits [n, vocab] that are finite."""
    device, samplings = logits.device, [row.sampling for row in rows]
    positions = torch.tensor([row.position for row in rows], device=device)
    if logits.is_cuda:  # by the very kernels that recorded computations use: a token hangs on no rounding of theirs
        context = Context(tables, torch.tensor([row.slot for row in rows], device=device), prefixes)
        parameters, num_tokens = Parameters.of(samplings, device), logits.shape[-1]
        with current(device):
            chosen = choose_rows(logits, parameters, positions, Needs.of(rows), context, num_tokens=num_tokens)
        return chosen.tokens
    scores = process(logits, ProcessorRows.from_rows(rows, device), tables, positions, prefixes)
    return choose(scores, SamplingRows.from_rows(samplings, device), positions)


def _processors(rows: Parameters, needs: Needs, context: Context) -> ProcessorRows:
    """All rows: one without processors is only added zeros and multiplied with ones."""
    return ProcessorRows(
        places=torch.arange(len(rows.seed), device=rows.seed.device),
        slots=context.slots,
        repetition=rows.repetition[:, None],
        presence=rows.presence[:, None],
        frequency=rows.frequency[:, None],
        free_from=rows.free_from[:, None],
        with_penalties=needs.penalties,
        with_bias=needs.bias,
        with_barred=needs.barred,
    )


def _choose(
    logits: Tensor, rows: Parameters, positions: Tensor, *, num_tokens: int, cuts: bool, barred: bool = False
) -> Chosen:
    if logits.is_cuda:
        from workers.engine.kernels import choose as kernels  # only machines with a GPU have Triton

        return kernels.choose(logits, rows, positions, num_tokens=num_tokens, cuts=cuts, barred=barred)
    real = logits[:, :num_tokens].float()
    tokens = choose(real, SamplingRows.from_rows(_read(rows), logits.device), positions)
    confidence = (real.gather(1, tokens[:, None])[:, 0] - real.logsumexp(dim=-1)).exp()
    return Chosen(tokens, confidence, real.isfinite().all(dim=-1))


def _read(rows: Parameters) -> list[Sampling]:
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed)
    return [Sampling(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
