"""The filters are those of transformers, row by row; the choice is the argmax of log p plus noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from relay.messages import Sampling
from workers.engine.noise import gumbel
from workers.engine.sampling import SamplingRows, choose, filtered

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def sampling(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
) -> Sampling:
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def reference_filtered(logits: torch.Tensor, row: Sampling) -> torch.Tensor:
    """What `generate` does to one row [vocab] of logits."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(row.temperature)])
    if row.top_k:
        warpers.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1.0:
        warpers.append(TopPLogitsWarper(row.top_p))
    if row.min_p:
        warpers.append(MinPLogitsWarper(row.min_p))
    return warpers(torch.zeros(1, 0, dtype=torch.int64), logits[None])[0]


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.5, 0.7, 1.0, 1.3, 2.0]) | st.floats(0.01, 2.0),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 50]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.95, 0.7, 0.5, 0.3]) | st.floats(0.0, 1.0),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]) | st.floats(0.0, 1.0),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[Sampling]]:
    """Logits with many ties and many scales, and settings for each row."""
    rows, vocab = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    values = st.sampled_from([0.0, 1.0, -1.0, 3.0, -30.0]) | st.floats(-40, 40, width=32)
    logits = draw(arrays(np.float32, (rows, vocab), elements=values))
    return torch.from_numpy(logits), [draw(samplings) for _ in range(rows)]


@given(batches())
@settings(max_examples=200, deadline=None)
def test_the_filters_are_those_of_transformers(batch: tuple[torch.Tensor, list[Sampling]]) -> None:
    logits, rows = batch
    expected = torch.stack([reference_filtered(*pair) for pair in zip(logits, rows, strict=True)])
    assert torch.equal(filtered(logits, SamplingRows.from_rows(rows)), expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_filters_are_those_of_transformers_over_a_long_vocabulary(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 5000, generator=generator) * 4
    logits[2:] = logits[2:].round()
    rows = [
        sampling(0.7, top_k=50, top_p=0.9),
        sampling(1.0, top_p=0.95, min_p=0.02),
        sampling(1.3, top_k=7),
        sampling(0.9, min_p=0.1),
        sampling(2.0, top_k=9000, top_p=0.3, min_p=0.5),
    ]
    expected = torch.stack([reference_filtered(*pair) for pair in zip(logits, rows, strict=True)])
    assert torch.equal(filtered(logits, SamplingRows.from_rows(rows)), expected)


@given(batches(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_row_chooses_the_same_alone_and_among_others(
    batch: tuple[torch.Tensor, list[Sampling]], data: st.DataObject
) -> None:
    logits, rows = batch
    rows = [data.draw(st.sampled_from([row, GREEDY])) for row in rows]
    positions = torch.tensor([data.draw(st.integers(0, 4096)) for _ in rows])
    together = choose(logits, SamplingRows.from_rows(rows), positions)
    for place, row in enumerate(rows):
        one = slice(place, place + 1)
        assert choose(logits[one], SamplingRows.from_rows([row]), positions[one]) == together[place]


@given(batches())
@settings(max_examples=100, deadline=None)
def test_a_filtered_token_is_never_chosen(batch: tuple[torch.Tensor, list[Sampling]]) -> None:
    logits, rows = batch
    params = SamplingRows.from_rows(rows)
    chosen = choose(logits, params, torch.arange(len(rows)))
    assert filtered(logits, params).gather(1, chosen[:, None]).isfinite().all()


def test_a_sampled_row_takes_the_best_of_log_probability_plus_noise() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    rows = [sampling(0.8, top_k=20, top_p=0.9, seed=seed) for seed in range(4)]
    positions = torch.arange(4) + 10
    log_p = torch.stack([reference_filtered(*pair) for pair in zip(logits, rows, strict=True)]).log_softmax(-1)
    expected = (log_p + gumbel(torch.arange(4), positions, 300)).argmax(-1)
    assert torch.equal(choose(logits, SamplingRows.from_rows(rows), positions), expected)


def test_a_greedy_row_ignores_every_other_setting() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])
    rows = [sampling(0.0, top_k=1, top_p=0.1, min_p=0.9, seed=4), GREEDY]
    assert choose(logits, SamplingRows.from_rows(rows), torch.tensor([3, 4])).tolist() == [1, 0]


def test_of_equal_logits_the_lowest_id_wins() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, 7.0]]).repeat(2, 5000)
    assert choose(logits, SamplingRows.from_rows([GREEDY] * 2), torch.tensor([0, 1])).tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [1e-9, 1e-6, 1e-5])
def test_a_vanishing_temperature_is_greedy_and_overflows_nowhere(temperature: float) -> None:
    logits = torch.tensor([[-900.0, 1000.0, 999.0]])
    rows = SamplingRows.from_rows([sampling(temperature, top_p=0.9, min_p=0.1)])
    assert choose(logits, rows, torch.tensor([0])).tolist() == [1]


def test_rows_that_do_not_sample_draw_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def counting(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
        drawn.append(len(seeds))
        return gumbel(seeds, positions, num_tokens)

    monkeypatch.setattr("workers.engine.noise.gumbel", counting)
    logits, positions = torch.zeros(3, 4), torch.arange(3)
    choose(logits, SamplingRows.from_rows([GREEDY] * 3), positions)
    assert drawn == []
    choose(logits, SamplingRows.from_rows([GREEDY, sampling(), GREEDY]), positions)
    assert drawn == [1]


def test_repeated_rows_keep_their_settings() -> None:
    rows = SamplingRows.from_rows([sampling(0.5, seed=1), GREEDY, sampling(0.7, top_k=4, seed=3)])
    repeated = rows.repeat([2, 1, 3])
    assert repeated.seed.tolist() == [1, 1, 0, 3, 3, 3]
    assert repeated.sampled.tolist() == [0, 1, 3, 4, 5]
    assert repeated.with_top_k.tolist() == [2, 3, 4]
    assert len(repeated) == 6
    assert len(rows.repeat([0, 0, 0])) == 0


def test_different_seeds_and_positions_give_different_tokens() -> None:
    logits = torch.zeros(200, 50_000)
    by_seed = choose(logits, SamplingRows.from_rows([sampling(seed=s) for s in range(200)]), torch.zeros(200).long())
    by_position = choose(logits, SamplingRows.from_rows([sampling()] * 200), torch.arange(200))
    assert len(set(by_seed.tolist())) > 190
    assert len(set(by_position.tolist())) > 190


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_chooses_what_the_cpu_chooses() -> None:
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(0)) * 3
    rows = [GREEDY if i % 4 == 0 else sampling(0.8, 50 * (i % 2), 0.9, 0.01 * (i % 3), i) for i in range(64)]
    positions = torch.arange(64) * 3
    on_cuda = choose(logits.cuda(), SamplingRows.from_rows(rows, "cuda"), positions.cuda()).cpu()
    assert torch.equal(on_cuda, choose(logits, SamplingRows.from_rows(rows), positions))
