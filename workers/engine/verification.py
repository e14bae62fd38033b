"""The tail's forward of a round, up to how much of each draft holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from workers.engine.choosing import Context, Needs, Parameters, choose_at, choose_rows
from workers.engine.graphs import Bucket, Graphs, Key
from workers.engine.processors import LogitRow, draft_prefixes
from workers.engine.shard import TailShard
from workers.engine.slottables import SlotTables
from workers.engine.tensors import pack_rows, pad_rows, padded_places
from workers.engine.verify import verify


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """Rows of a round: base token and draft of each, as hidden states at the cut."""

    #: packed [sum of the rows' tokens, hidden], on the half's device
    hidden: Tensor
    #: where the token behind each row's base token belongs
    rows: Sequence[LogitRow]
    drafts: Sequence[Sequence[int]]

    @property
    def counts(self) -> list[int]:
        """Tokens of each row."""
        return [1 + len(draft) for draft in self.drafts]

    @property
    def slots(self) -> list[int]:
        """Each row's slot."""
        return [row.slot for row in self.rows]

    @property
    def starts(self) -> list[int]:
        """Absolute positions of the base tokens."""
        return [row.position - 1 for row in self.rows]

    @property
    def wants_logprobs(self) -> bool:
        """Whether some row asks for log probabilities."""
        return any(row.sampling.logprobs is not None for row in self.rows)


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of each row."""

    #: drafted tokens that hold
    accepted: list[int]
    #: the target's own token behind them
    following: list[int]
    #: whether all of the row's logits are finite
    finite: list[bool]
    #: the model's own logits [n, vocab], for rows that want log probabilities; None if none does. Good until the next
    #: forward
    logits: Tensor | None
    #: where each row's begin
    places: list[int]


def verify_rows(shard: TailShard, tables: SlotTables, rows: VerifyRows) -> Verified:
    """Run rows through the half, choose a token at each of their positions, and see how much of their drafts holds."""
    if shard.graphs is not None:
        return _verify_recorded(shard, shard.graphs, tables, rows)
    logits, counts = _logits(shard, rows), rows.counts
    places = [
        row._replace(position=row.position + depth)
        for row, count in zip(rows.rows, counts, strict=True)
        for depth in range(count)
    ]
    counted = any(row.sampling.has_penalties for row in rows.rows)
    prefixes = draft_prefixes(rows.drafts, logits.device) if counted else None
    choices = pad_rows(choose_at(logits, places, tables, prefixes), counts)  # [rows, K + 1]
    drafts = _padded(rows.drafts, choices.shape[1] - 1).to(choices.device)
    accepted = verify(choices, drafts, torch.tensor(counts, device=choices.device) - 1)
    following = choices.gather(1, accepted[:, None])[:, 0]
    finite = [bool(part.all()) for part in torch.split(logits.isfinite().all(dim=-1).cpu(), counts)]
    begins = list(accumulate(counts, initial=0))[:-1]
    return Verified(accepted.tolist(), following.tolist(), finite, logits if rows.wants_logprobs else None, begins)


def _logits(shard: TailShard, rows: VerifyRows) -> Tensor:
    """The float32 logits [sum of the rows' tokens, vocab]."""
    hidden = pad_rows(rows.hidden, rows.counts)
    output = shard.forward(hidden, torch.tensor(rows.slots), torch.tensor(rows.starts))
    return shard.logits(pack_rows(output, rows.counts))


def _verify_recorded(shard: TailShard, graphs: Graphs, tables: SlotTables, rows: VerifyRows) -> Verified:
    """Forward, LM head, choice and verification of a round as one recorded computation."""
    counts = rows.counts
    longest = max(start + count for start, count in zip(rows.starts, counts, strict=True))
    bucket = shard.bucket(len(counts), max(counts), longest)
    needs, keeps_logits = Needs.of(rows.rows), rows.wants_logprobs
    graph = graphs.get(
        Key("verify", bucket, (needs, tables, tables.allocated, keeps_logits)),
        lambda: _buffers(shard, bucket),
        lambda **inputs: _verify(shard, tables, bucket, needs, keeps_logits, **inputs),
    )
    outputs = graph.run(
        packed=rows.hidden,
        places=torch.tensor(padded_places(counts, bucket.query), dtype=torch.int64),
        slots=shard.with_scratch(torch.tensor(rows.slots, dtype=torch.int64), bucket),
        starts=torch.tensor(rows.starts, dtype=torch.int64),
        drafts=_padded(rows.drafts, bucket.query - 1),
        lengths=torch.tensor(counts, dtype=torch.int64) - 1,
        **Parameters.news(graph, [row.sampling for row in rows.rows]),
    )
    accepted, following, finite = outputs["verdicts"].cpu()[:, : len(counts)].tolist()
    places = [index * bucket.query for index in range(len(counts))]
    return Verified(accepted, following, [bool(flag) for flag in finite], outputs.get("logits"), places)


def _padded(drafts: Sequence[Sequence[int]], most: int) -> Tensor:
    """int64 [rows, most]."""
    return torch.tensor([[*draft, *[0] * (most - len(draft))] for draft in drafts], dtype=torch.int64)


def _buffers(shard: TailShard, bucket: Bucket) -> dict[str, Tensor]:
    tokens = bucket.rows * bucket.query

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=shard.device)

    return {
        "packed": zeros(tokens, shard.hidden_size, dtype=shard.dtype),
        "places": zeros(tokens),
        "slots": torch.full((bucket.rows,), shard.scratch_slot, device=shard.device),
        "starts": zeros(bucket.rows),
        "drafts": zeros(bucket.rows, bucket.query - 1),
        "lengths": zeros(bucket.rows),
        **Parameters.greedy(bucket.rows, shard.device).tensors(),
    }


def _verify(
    shard: TailShard,
    tables: SlotTables,
    bucket: Bucket,
    needs: Needs,
    keeps_logits: bool,
    *,
    packed: Tensor,
    places: Tensor,
    slots: Tensor,
    starts: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    **parameters: Tensor,
) -> dict[str, Tensor]:
    """The computation itself, on the device."""
    rows, query = bucket.rows, bucket.query
    hidden = packed.index_select(0, places).reshape(rows, query, -1)
    logits = shard.raw_logits(shard.run(hidden, slots, starts, bucket.longest).flatten(0, 1))
    offsets = torch.arange(query, device=starts.device)
    # in front of the row at offset i stand the first i drafted tokens
    prefixes = drafts[:, None, :].where(offsets[: query - 1] < offsets[:, None], -1).flatten(0, 1)
    chosen = choose_rows(
        logits,
        Parameters(**parameters).repeat(query),
        (starts[:, None] + 1 + offsets).flatten(),
        needs,
        Context(tables, slots.repeat_interleave(query), prefixes),
        num_tokens=shard.vocab_size,
    )
    choices = chosen.tokens.reshape(rows, query)
    accepted = verify(choices, drafts, lengths)
    following = choices.gather(1, accepted[:, None])[:, 0]
    finite = (chosen.finite.reshape(rows, query) | (offsets > lengths[:, None])).all(dim=1)
    # one tensor, so that one copy brings all to the host
    verdicts = {"verdicts": torch.stack((accepted, following, finite.long()))}
    return {**verdicts, "logits": logits} if keeps_logits else verdicts
