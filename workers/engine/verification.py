"""The tail's forward of a round, up to how much of each draft holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relay.messages import Sampling
from workers.engine.choosing import Parameters, choose_rows, has_filter
from workers.engine.graphs import Bucket, Graphs
from workers.engine.sampling import SamplingRows, choose
from workers.engine.shard import TailShard
from workers.engine.tensors import packed_places, pad_rows, padded_places
from workers.engine.verify import verify


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """Rows of a round: base token and draft of each, as hidden states at the cut."""

    #: packed [sum of the rows' tokens, hidden], on the half's device
    hidden: Tensor
    slots: Sequence[int]
    #: absolute positions of the base tokens
    starts: Sequence[int]
    drafts: Sequence[Sequence[int]]
    samplings: Sequence[Sampling]

    @property
    def counts(self) -> list[int]:
        """Tokens of each row."""
        return [1 + len(draft) for draft in self.drafts]


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of each row."""

    #: drafted tokens that hold
    accepted: list[int]
    #: the target's own token behind them
    following: list[int]
    #: whether all of the row's logits are finite
    finite: list[bool]


def verify_rows(shard: TailShard, rows: VerifyRows) -> Verified:
    """Run rows through the half, choose a token at each of their positions, and see how much of their drafts holds."""
    if shard.graphs is not None:
        return _verify_recorded(shard, shard.graphs, rows)
    logits, counts = logits_of(shard, rows), rows.counts
    per_token = [row for row, count in zip(rows.samplings, counts, strict=True) for _ in range(count)]
    positions = [start + 1 + i for start, count in zip(rows.starts, counts, strict=True) for i in range(count)]
    chosen = choose(
        logits, SamplingRows.from_rows(per_token, logits.device), torch.tensor(positions, device=logits.device)
    )
    choices = pad_rows(chosen, counts)  # [rows, K + 1]
    drafts = _padded(rows.drafts, choices.shape[1] - 1).to(choices.device)
    accepted = verify(choices, drafts, torch.tensor(counts, device=choices.device) - 1)
    following = choices.gather(1, accepted[:, None])[:, 0]
    finite = [bool(part.all()) for part in torch.split(logits.isfinite().all(dim=-1).cpu(), counts)]
    return Verified(accepted.tolist(), following.tolist(), finite)


def _verify_recorded(shard: TailShard, graphs: Graphs, rows: VerifyRows) -> Verified:
    """Forward, LM head, choice and verification of a round as one recorded computation."""
    counts = rows.counts
    longest = max(start + count for start, count in zip(rows.starts, counts, strict=True))
    bucket = shard.bucket(len(counts), max(counts), longest)
    cuts = any(map(has_filter, rows.samplings))
    graph = graphs.get(
        ("verify", bucket, cuts),
        lambda: _buffers(shard, bucket),
        lambda **inputs: _verify(shard, bucket, cuts, **inputs),
    )
    outputs = graph.run(
        packed=rows.hidden,
        places=torch.tensor(padded_places(counts, bucket.query), dtype=torch.int64),
        slots=shard.with_scratch(torch.tensor(rows.slots, dtype=torch.int64), bucket),
        starts=torch.tensor(rows.starts, dtype=torch.int64),
        drafts=_padded(rows.drafts, bucket.query - 1),
        lengths=torch.tensor(counts, dtype=torch.int64) - 1,
        **Parameters.of(rows.samplings).tensors(),
    )
    accepted, following, finite = outputs["verdicts"].cpu()[:, : len(counts)].tolist()
    return Verified(accepted, following, [bool(flag) for flag in finite])


def logits_of(shard: TailShard, rows: VerifyRows) -> Tensor:
    """The float32 logits [sum of the rows' tokens, vocab] of rows whose tokens are chosen elsewhere."""
    counts = rows.counts
    query = max(counts)
    places = torch.tensor(padded_places(counts, query), device=rows.hidden.device)
    hidden = rows.hidden.index_select(0, places).reshape(len(counts), query, -1)
    output = shard.forward(hidden, torch.tensor(rows.slots), torch.tensor(rows.starts))
    packed = torch.tensor(packed_places(counts, query), device=output.device)
    return shard.logits(output.flatten(0, 1).index_select(0, packed))


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
    bucket: Bucket,
    cuts: bool,
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
    output = shard.run(hidden, slots, starts, bucket.longest)
    logits = shard.raw_logits(output.flatten(0, 1))
    offsets = torch.arange(query, device=starts.device)
    positions = (starts[:, None] + 1 + offsets).flatten()
    per_token = Parameters(**parameters).repeat(query)
    chosen = choose_rows(logits, per_token, positions, num_tokens=shard.vocab_size, cuts=cuts)
    choices = chosen.tokens.reshape(rows, query)
    accepted = verify(choices, drafts, lengths)
    following = choices.gather(1, accepted[:, None])[:, 0]
    finite = (chosen.finite.reshape(rows, query) | (offsets > lengths[:, None])).all(dim=1)
    # one tensor, so that one copy brings all to the host
    return {"verdicts": torch.stack((accepted, following, finite.long()))}
