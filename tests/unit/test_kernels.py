"""The kernels against plain torch: on a GPU if there is one, else by Triton's interpreter, which runs the same code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from relay.messages import Sampling
from tests.interpreted import HAS_GPU
from workers.engine import sampling
from workers.engine.choosing import Parameters
from workers.engine.sampling import SamplingRows

pytest.importorskip("triton")

from workers.engine.kernels import attention as kernels
from workers.engine.kernels.choose import choose
from workers.engine.kernels.linear import Tile, add_rms_norm, linear, rms_norm, silu_mul

DIM = 16

#: the interpreter's products are numpy's, whose bits depend on the shape
bits_matter = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with torch.device("cuda" if HAS_GPU else "cpu"):
        yield


def normed(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    return nn.functional.rms_norm(x, (x.shape[1],), gain, eps)


TILE = Tile(block_m=16, block_n=16, block_k=32, stages=2)


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 70, 96), (9, 48, 80), (40, 33, 48)])
def test_a_linear_layer_is_torchs(tokens: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(tokens)
    x, weight, bias = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(outputs)

    result = linear(x, weight, TILE, bias=bias)

    torch.testing.assert_close(result, nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_product_are_summed_with_the_residual_and_normed(parts: int) -> None:
    torch.manual_seed(1)
    x, residual, gain, weight = torch.randn(5, 200) * 3, torch.randn(5, 40), torch.randn(40), torch.randn(40, 200)

    product = linear(x, weight, replace(TILE, parts=parts))
    total, out = add_rms_norm(residual, product, gain, 1e-6)

    assert product.shape == (parts, 5, 40)
    torch.testing.assert_close(total, residual + x @ weight.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out, normed(total, gain), rtol=1e-5, atol=1e-5)


def test_a_gate_is_part_of_a_product() -> None:
    torch.manual_seed(1)
    x, gate_up = torch.randn(5, 96), torch.randn(80, 96)

    gated = linear(x, gate_up, TILE, gated=True)

    gate, up = (x @ gate_up.T).chunk(2, dim=1)
    torch.testing.assert_close(gated, nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-4)


@bits_matter
def test_a_token_does_not_notice_the_tokens_beside_it() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(40, 64), torch.randn(48, 64)

    together = linear(x, weight, TILE)
    alone = torch.cat([linear(row[None], weight, TILE) for row in x])

    assert torch.equal(together, alone)


def test_norms_and_gates_of_many_tokens_are_torchs() -> None:
    torch.manual_seed(3)
    x, delta, gain = torch.randn(7, 48), torch.randn(7, 48), torch.randn(48)

    total, out = add_rms_norm(x, delta, gain, 1e-6)

    assert torch.equal(total, x + delta)
    assert torch.equal(add_rms_norm(x, delta, None, 1e-6)[1], x + delta)
    torch.testing.assert_close(out, normed(x + delta, gain))
    torch.testing.assert_close(rms_norm(x, gain, 1e-6), normed(x, gain))
    gate, up = x.chunk(2, dim=1)
    torch.testing.assert_close(silu_mul(x), nn.functional.silu(gate) * up)


class Rows:
    """Two rows in slots of their own order over caches full of old values."""

    def __init__(self, *, query: int, kv_heads: int = 2, group: int = 3, capacity: int = 240) -> None:
        torch.manual_seed(query)
        self.slots, self.starts = torch.tensor([3, 0]), torch.tensor([70, 0])
        self.keys = torch.randn(5, kv_heads, capacity, DIM)
        self.values = torch.randn(5, kv_heads, capacity, DIM)
        self.query = torch.randn(2 * query, kv_heads * group, DIM)
        self.length, self.group = query, group

    def expected(self, window: int | None) -> Tensor:
        """Row by row, query by query, over its own positions only."""
        results = []
        for token, query in enumerate(self.query):
            row = token // self.length
            position = int(self.starts[row]) + token % self.length
            low = 0 if window is None else max(0, position - window + 1)
            slot = self.slots[row]
            keys = self.keys[slot, :, low : position + 1].repeat_interleave(self.group, dim=0)
            values = self.values[slot, :, low : position + 1].repeat_interleave(self.group, dim=0)
            scores = (keys @ query[:, :, None])[..., 0] * DIM**-0.5
            results.append((scores.softmax(dim=-1)[:, None] @ values)[:, 0].reshape(-1))
        return torch.stack(results)


@pytest.mark.parametrize("query", [1, 30])
@pytest.mark.parametrize("window", [None, 40])
def test_every_query_sees_its_own_positions_of_its_own_slot(query: int, window: int | None) -> None:
    rows = Rows(query=query)

    result = kernels.attend(
        rows.query,
        rows.keys,
        rows.values,
        rows.slots,
        rows.starts,
        longest=70 + query,
        scale=DIM**-0.5,
        window=window,
    )

    torch.testing.assert_close(result, rows.expected(window), rtol=1e-5, atol=1e-5)


@bits_matter
def test_attention_does_not_notice_neighbours_nor_how_many_queries_come_together() -> None:
    rows = Rows(query=9)
    settings = {"scale": DIM**-0.5, "window": None, "queries": 64, "piece": 64}

    together = kernels.attend(rows.query, rows.keys, rows.values, rows.slots, rows.starts, longest=240, **settings)
    alone = []
    for token in range(18):
        slot, start = rows.slots[token // 9, None], rows.starts[token // 9, None] + token % 9
        query, longest = rows.query[token, None], int(start) + 1
        alone.append(kernels.attend(query, rows.keys, rows.values, slot, start, longest=longest, **settings))

    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("with_gains", [False, True])
def test_queries_and_keys_are_turned_and_the_cache_is_written_where_the_rows_stand(with_gains: bool) -> None:
    torch.manual_seed(5)
    query, heads, kv_heads = 4, 3, 1
    qkv = torch.randn(3 * query, (heads + 2 * kv_heads) * DIM)
    slots, starts = torch.tensor([3, 0, 2]), torch.tensor([0, 601, 257])
    keys, values = torch.zeros(5, kv_heads, 700, DIM), torch.zeros(5, kv_heads, 700, DIM)
    angles = torch.rand(700, DIM // 2) * 6
    gains = (torch.randn(DIM), torch.randn(DIM), 1e-6) if with_gains else None

    turned = kernels.rotate_and_store(qkv, angles.cos(), angles.sin(), gains, slots, starts, keys, values)

    parts = qkv.reshape(3 * query, heads + 2 * kv_heads, DIM)
    positions = (starts[:, None] + torch.arange(query)).reshape(-1)

    def rotated(part: Tensor, gain: Tensor | None) -> Tensor:
        if gain is not None:
            part = nn.functional.rms_norm(part, (DIM,), gain, 1e-6)
        low, high = part.chunk(2, dim=-1)
        cos, sin = angles.cos()[positions][:, None], angles.sin()[positions][:, None]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    torch.testing.assert_close(turned, rotated(parts[:, :heads], gains and gains[0]), rtol=1e-5, atol=1e-5)
    slot_of = slots.repeat_interleave(query)
    stored = keys[slot_of, :, positions]
    torch.testing.assert_close(stored, rotated(parts[:, heads : heads + 1], gains and gains[1]), rtol=1e-5, atol=1e-5)
    assert torch.equal(values[slot_of, :, positions], parts[:, heads + 1 :])
    assert int((values != 0).any(dim=-1).sum()) == 3 * query


SETTINGS = [
    Sampling(temperature, top_k, top_p, min_p, seed)
    for seed, (temperature, top_k, top_p, min_p) in enumerate(
        [(0.0, 0, 1.0, 0.0), (1.3, 5, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (0.7, 50, 0.9, 0.1), (0.7, 0, 0.8, 0.0)]
    )
]


def test_tokens_are_chosen_as_on_the_cpu() -> None:
    torch.manual_seed(6)
    num_tokens = 4200
    logits = torch.randn(len(SETTINGS), num_tokens + 7) * 3
    logits[:4] = (logits[:4] * 4).round() / 4  # ties, also at the nucleus' edge
    positions = torch.randint(0, 1000, (len(SETTINGS),))
    device = logits.device

    chosen = choose(logits, Parameters.of(SETTINGS, device), positions, num_tokens=num_tokens, cuts=True)

    with torch.device("cpu"):
        rows, places = SamplingRows.from_rows(SETTINGS), positions.cpu()
        expected = sampling.choose(logits[:, :num_tokens].cpu().contiguous(), rows, places)
    assert chosen.tokens.tolist() == expected.tolist()
    # and where the filters' edges lie further below the best token, or among more tokens, than is looked at first
    flat = logits / 50
    chosen_flat = choose(flat, Parameters.of(SETTINGS, device), positions, num_tokens=num_tokens, cuts=True)
    with torch.device("cpu"):
        expected_flat = sampling.choose(flat[:, :num_tokens].cpu().contiguous(), rows, places)
    assert chosen_flat.tokens.tolist() == expected_flat.tolist()
    likely = logits[:, :num_tokens].softmax(dim=-1).gather(1, chosen.tokens[:, None])[:, 0]
    torch.testing.assert_close(chosen.confidence, likely, rtol=1e-4, atol=1e-6)
    assert bool(chosen.finite.all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_a_value_that_is_no_number_says_so(value: float) -> None:
    logits = torch.randn(3, 300)
    logits[1, 299] = value
    rows = Parameters.of(SETTINGS[:3], logits.device)

    chosen = choose(logits, rows, torch.zeros(3, dtype=torch.int64), num_tokens=300, cuts=True)

    assert chosen.finite.tolist() == [True, False, True]
    assert all(0 <= token < 300 for token in chosen.tokens.tolist())


def test_a_row_with_barred_tokens_is_sound_and_chooses_among_the_others() -> None:
    torch.manual_seed(7)
    logits = torch.randn(2, 5000)
    logits[0, :4500] = float("-inf")

    chosen = choose(
        logits,
        Parameters.of([SETTINGS[0]] * 2, logits.device),
        torch.zeros(2, dtype=torch.int64),
        num_tokens=5000,
        cuts=False,
        barred=True,
    )

    assert chosen.finite.tolist() == [True, True]
    assert int(chosen.tokens[0]) == 4500 + int(logits[0, 4500:].argmax())
    torch.testing.assert_close(chosen.confidence, logits.softmax(dim=-1).amax(dim=-1), rtol=1e-4, atol=1e-6)
