"""Processors are those of transformers, row by row, whatever a slot has committed and drafted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.messages import History, Sampling
from tasks.generation import GenerationRequest, TokenBias
from tests.processors import library_processors
from workers.engine.logprobs import token_logprobs
from workers.engine.processors import LogitRow, ProcessorRows, draft_prefixes, process
from workers.engine.slottables import SlotTables

VOCAB, SLOTS = 13, 3
PLAIN = Sampling(1.0, 0, 1.0, 0.0, 0)

tokens = st.lists(st.integers(0, VOCAB - 1), max_size=9)
samplings = st.builds(
    Sampling,
    *(st.just(1.0), st.just(0), st.just(1.0), st.just(0.0), st.just(0)),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
    barred=st.sets(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    free_from=st.integers(0, 30),
)


def expected(logits: torch.Tensor, sampling: Sampling, prompt: list[int], output: list[int]) -> torch.Tensor:
    """One row [vocab] through the library's processors."""
    request = GenerationRequest(
        None,
        None,
        0,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(TokenBias(*pair) for pair in sampling.logit_bias),
        min_tokens=max(0, sampling.free_from - len(prompt)),
    )
    processors = library_processors(request, len(prompt), list(sampling.barred))
    return processors(torch.tensor([[*prompt, *output]]), logits[None].clone())[0]


def begun(jobs: dict[int, tuple[Sampling, list[int], list[int]]]) -> SlotTables:
    tables = SlotTables(SLOTS, VOCAB, "cpu")
    for slot, (sampling, prompt, output) in jobs.items():
        tables.begin(slot, sampling, History(tuple(prompt), tuple(output)))
    return tables


@given(st.lists(st.tuples(samplings, tokens, tokens, tokens, tokens), min_size=1, max_size=SLOTS), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_every_row_of_a_draft_is_processed_as_the_library_would_with_the_draft_as_output(
    jobs: list[tuple[Sampling, list[int], list[int], list[int], list[int]]], seed: int
) -> None:
    jobs = [(sampling, [1, *prompt], *rest) for sampling, prompt, *rest in jobs]  # type: ignore[misc]
    tables = begun({slot: (sampling, prompt, output) for slot, (sampling, prompt, output, _, _) in enumerate(jobs)})
    tables.commit({slot: more for slot, (_, _, _, more, _) in enumerate(jobs)})
    rows, wanted, logits = [], [], torch.randn(100, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    for slot, (sampling, prompt, output, more, draft) in enumerate(jobs):
        for depth in range(len(draft) + 1):
            text = [*output, *more, *draft[:depth]]
            wanted.append(expected(logits[len(rows)], sampling, prompt, text))
            rows.append(LogitRow(slot, sampling, len(prompt) + len(text)))
    logits = logits[: len(rows)]
    positions, prefixes = torch.tensor([row.position for row in rows]), draft_prefixes([job[4] for job in jobs], "cpu")
    result = process(logits, ProcessorRows.from_rows(rows, "cpu"), tables, positions, prefixes)
    torch.testing.assert_close(result, torch.stack(wanted), rtol=0, atol=5e-6)
    for place, row in enumerate(rows):
        if not row.is_processed:
            assert torch.equal(result[place], logits[place])
        alone = process(
            logits[place : place + 1],
            ProcessorRows.from_rows([row], "cpu"),
            tables,
            positions[place : place + 1],
            prefixes[place : place + 1],
        )
        assert torch.equal(alone[0], result[place])


def test_rows_without_processors_are_handed_back_untouched() -> None:
    logits = torch.randn(2, VOCAB)
    done = replace(PLAIN, barred=(1,), free_from=5)
    rows = ProcessorRows.from_rows([LogitRow(0, PLAIN, 9), LogitRow(1, done, 5)], "cpu")
    assert rows is None
    assert process(logits, rows, SlotTables(SLOTS, VOCAB, "cpu"), torch.tensor([9, 5])) is logits


def test_tables_are_allocated_when_a_slot_needs_them_and_stay_where_they_are() -> None:
    tables = SlotTables(SLOTS, VOCAB, "cpu")
    tables.begin(0, PLAIN, None)
    assert (tables.counts, tables.prompted, tables.bias, tables.barred) == (None, None, None, None)
    tables.begin(0, replace(PLAIN, presence_penalty=1.0), History((), (4,)))
    assert tables.counts is not None
    assert (tables.prompted, tables.bias) == (None, None)
    address = tables.counts.data_ptr()
    for slot in range(SLOTS):
        tables.begin(slot, replace(PLAIN, frequency_penalty=1.0), History((), (4, 5)))
        tables.commit({slot: (5,)})
    assert tables.counts.data_ptr() == address
    assert tables.counts.tolist() == [[0] * 4 + [1, 2] + [0] * 7] * SLOTS + [[0] * VOCAB]


@pytest.mark.parametrize("end", [lambda t: t.forget(0), lambda t: t.clear(), lambda t: t.begin(0, PLAIN, None)])
def test_a_job_that_is_over_leaves_nothing_behind(end: object) -> None:
    everything = replace(
        PLAIN, repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((3, 1.0),), barred=(5,), free_from=9
    )
    tables = begun({0: (everything, [1, 2], [3])})
    end(tables)  # type: ignore[operator]
    tables.commit({0: (7,)})
    for table in (tables.counts, tables.prompted, tables.bias, tables.barred):
        assert table is not None
        assert not table.any()


def test_a_smaller_vocabulary_than_the_tables_is_their_beginning() -> None:
    sampling = replace(PLAIN, repetition_penalty=2.0, logit_bias=((12, 1.0), (1, 1.0)), barred=(12,), free_from=9)
    tables = begun({0: (sampling, [12, 3], [12, 4])})
    logits = torch.ones(1, 6)
    result = process(logits, ProcessorRows.from_rows([LogitRow(0, sampling, 5)], "cpu"), tables, torch.tensor([5]))
    assert result.tolist() == [[1.0, 2.0, 1.0, 0.5, 0.5, 1.0]]
    narrow = SlotTables(1, 6, "cpu")
    narrow.begin(0, sampling, History((12, 3), (12, 4)))
    narrow.commit({0: (12, 5)})
    assert narrow.counts is not None
    assert narrow.counts[0].tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("penalty", [0.0, 1e-300, 1e300, 3e38])
def test_parameters_without_measure_leave_numbers(penalty: float) -> None:
    sampling = replace(
        PLAIN,
        repetition_penalty=penalty,
        presence_penalty=-penalty,
        frequency_penalty=penalty,
        logit_bias=((1, penalty), (2, -penalty)),
    )
    tables = begun({0: (sampling, [0, 1], [1, 1, 2])})
    logits = torch.linspace(-5, 5, VOCAB)[None]
    result = process(logits, ProcessorRows.from_rows([LogitRow(0, sampling, 5)], "cpu"), tables, torch.tensor([5]))
    assert result.isfinite().all()


def test_log_probabilities_are_those_of_the_logits_and_the_likeliest_come_first() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * 5
    chosen, wanted = torch.tensor([3, 0, 12, 5]), [2, 0, 20, 5]
    logprobs = logits.log_softmax(-1)
    for row, told in enumerate(token_logprobs(logits, chosen, wanted)):
        order = sorted(range(VOCAB), key=lambda token: -float(logprobs[row, token]))[: wanted[row]]
        assert told.chosen == float(logprobs[row, chosen[row]])
        assert list(told.top) == order
        assert list(told.top_logprobs) == [float(logprobs[row, token]) for token in order]
    assert token_logprobs(logits[:0], chosen[:0], []) == []


def test_log_probabilities_of_logits_at_both_ends_of_float32_are_numbers() -> None:
    (told,) = token_logprobs(torch.tensor([[3e38, -3e38]]), torch.tensor([1]), [2])
    assert told.top == (0, 1)
    assert all(-3.5e38 < value <= 0.0 for value in (told.chosen, *told.top_logprobs))


def test_prefixes_are_the_drafted_tokens_in_front_of_each_row() -> None:
    assert draft_prefixes([(7, 8), (), (9,)], "cpu").tolist() == [
        [-1, -1],
        [7, -1],
        [7, 8],
        [-1, -1],
        [-1, -1],
        [9, -1],
    ]
    assert draft_prefixes([(), ()], "cpu").shape == (2, 0)


def test_counting_in_pieces_is_counting_at_once() -> None:
    rng = random.Random(1)
    text = [rng.randrange(VOCAB) for _ in range(60)]
    sampling = replace(PLAIN, frequency_penalty=1.0)
    whole, pieces = begun({1: (sampling, [], text)}), begun({1: (sampling, [], [])})
    while text:
        size = rng.randrange(1, 6)
        pieces.commit({0: [1, 2], 1: text[:size]})  # nobody counts in slot 0
        del text[:size]
    assert whole.counts is not None
    assert pieces.counts is not None
    assert torch.equal(whole.counts, pieces.counts)
