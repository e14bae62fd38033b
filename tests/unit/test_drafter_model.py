"""A model drafter that is the target itself is always right: its cache has no holes, however rounds end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from relay.messages import Sampling
from tests.models import VOCABULARY, tiny_model
from workers.engine.loader import load_whole
from workers.engine.sampling import SamplingRows, choose
from workers.head.drafters.drafter import NOTHING, DraftRow
from workers.head.drafters.model import DraftModel, ModelDrafter

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
MAX_LENGTH = 96
MAX_QUERY = 8


@dataclass
class RememberingModel:
    """A model whose next token is a hash of everything its cache holds up to the query: any hole shows.

    Its hidden state is that hash; its logits prefer token `hash % vocab`.
    """

    vocab: int = 17
    slots: int = 4
    max_length: int = MAX_LENGTH
    max_query: int = MAX_QUERY
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    widths: list[int] = field(default_factory=list)
    zeroed: list[int] = field(default_factory=list)
    copied: list[tuple[int, int, int]] = field(default_factory=list)
    broken_slot: int | None = None

    def __post_init__(self) -> None:
        self.cache = torch.full((self.slots + 1, self.max_length + self.max_query), -1)

    def forward(self, tokens: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        rows, query = tokens.shape
        assert query <= self.max_query
        assert len(set(slots.tolist())) == rows
        assert int(starts.min()) >= 0
        assert int(starts.max()) < self.max_length
        self.widths.append(query)
        hidden = torch.zeros(rows, query, 1, dtype=torch.float64)
        for row, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
            self.cache[slot, start : start + query] = tokens[row]
            for place in range(query):
                seen = self.cache[slot, : start + place + 1].tolist()
                hidden[row, place] = float("nan") if slot == self.broken_slot else self.digest(seen)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        wanted = hidden[:, :1] % self.vocab
        return -(torch.arange(self.vocab) - wanted).abs().float()

    def draft(self, *_: object, **__: object) -> None:
        """Drafts step by step only."""

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        self.copied.append((source, destination, length))
        self.cache[destination, :length] = self.cache[source, :length]

    def zero_slot(self, slot: int) -> None:
        self.zeroed.append(slot)
        self.cache[slot] = -1

    def digest(self, tokens: list[int]) -> float:
        assert -1 not in tokens
        return float(hash(tuple(tokens)) % 1_000_003)

    def next_token(self, tokens: list[int], sampling: Sampling) -> int:
        """The target's choice after `tokens`."""
        logits = self.logits(torch.tensor([[self.digest(tokens)]], dtype=torch.float64))
        return int(choose(logits, SamplingRows.from_rows([sampling]), torch.tensor([len(tokens)])))


def continuation(model: RememberingModel, tokens: list[int], sampling: Sampling, count: int) -> list[int]:
    out = list(tokens)
    for _ in range(count):
        out.append(model.next_token(out, sampling))
    return out[len(tokens) :]


def row(tokens: list[int], limit: int = 4, slot: int = 0, sampling: Sampling = GREEDY) -> DraftRow:
    return DraftRow(slot=slot, tokens=tokens, sampling=sampling, limit=limit)


def begun(model: DraftModel, num_tokens: int = 17, slots: int = 4) -> ModelDrafter:
    drafter = ModelDrafter(model, num_tokens)
    for slot in range(slots):
        drafter.begin(slot)
    return drafter


@pytest.mark.parametrize("length", [1, 2, 3, MAX_QUERY, MAX_QUERY + 2, 5 * MAX_QUERY + 3])
def test_a_new_row_is_caught_up_whatever_its_length(length: int) -> None:
    model = RememberingModel()
    prompt = [i * 7 % 17 for i in range(length)]
    (proposal,) = begun(model).propose([row(prompt)])
    assert list(proposal.tokens) == continuation(model, prompt, GREEDY, 4)
    assert max(model.widths) <= MAX_QUERY


def test_a_row_that_begins_like_another_ones_text_copies_that_instead_of_feeding_it() -> None:
    model = RememberingModel()
    drafter, prompt = begun(model), [i * 7 % 17 for i in range(40)]
    drafter.propose([row(prompt, slot=0)])
    drafter.end(0)
    model.widths.clear()
    other = [*prompt[:30], 5, 6, 7]
    (proposal,) = drafter.propose([row(other, slot=2)])
    assert list(proposal.tokens) == continuation(model, other, GREEDY, 4)
    assert model.copied == [(0, 2, 30)]
    assert model.widths == [1, 2, 1, 1, 1]


def test_a_new_row_in_the_same_slot_goes_on_behind_what_both_have_in_common() -> None:
    model = RememberingModel()
    drafter, prompt = begun(model), [i * 7 % 17 for i in range(40)]
    drafter.propose([row(prompt)])
    drafter.begin(0)
    model.widths.clear()
    other = [*prompt[:30], 5, 6, 7]
    (proposal,) = drafter.propose([row(other)])
    assert list(proposal.tokens) == continuation(model, other, GREEDY, 4)
    assert (model.copied, model.widths) == ([], [1, 2, 1, 1, 1])


def test_fully_accepted_rounds_leave_no_hole() -> None:
    model = RememberingModel()
    drafter, tokens = begun(model), [3, 1, 4]
    for _ in range(10):
        (proposal,) = drafter.propose([row(tokens)])
        assert list(proposal.tokens) == continuation(model, tokens, GREEDY, 4)
        tokens = tokens + continuation(model, tokens, GREEDY, 5)


def test_a_running_row_costs_one_forward_per_drafted_token() -> None:
    model = RememberingModel()
    drafter, tokens = begun(model), [3, 1, 4]
    drafter.propose([row(tokens)])
    for num_accepted in (4, 0, 2, 4):
        tokens = tokens + continuation(model, tokens, GREEDY, num_accepted) + [num_accepted]
        model.widths.clear()
        drafter.propose([row(tokens)])
        assert model.widths == [2, 1, 1, 1]


@pytest.mark.parametrize("seed", range(8))
def test_any_mix_of_rounds_is_drafted_right(seed: int) -> None:
    """Ragged rows, limits of each row's own (0 too), rounds that sit out, refusals, slots used again."""
    rng = random.Random(seed)
    model = RememberingModel()
    drafter = begun(model)
    sampling = [GREEDY, *(Sampling(1.5, 0, 1.0, 0.0, s) for s in range(3))]
    texts = {slot: [rng.randrange(17) for _ in range(rng.randrange(1, 30))] for slot in range(4)}
    for _ in range(30):
        chosen = rng.sample(range(4), rng.randrange(1, 5))
        rows = [row(texts[s], rng.randrange(6), s, sampling[s]) for s in chosen]
        for asked, proposal in zip(rows, drafter.propose(rows), strict=True):
            expected = continuation(model, list(asked.tokens), asked.sampling, asked.limit)
            assert list(proposal.tokens) == expected
            kept = expected[: rng.randrange(asked.limit + 1)]
            texts[asked.slot] = [*asked.tokens, *kept, rng.randrange(17)]
        for slot in [s for s in chosen if len(texts[s]) > MAX_LENGTH - 12 or rng.random() < 0.05]:
            drafter.end(slot)
            drafter.begin(slot)
            texts[slot] = [rng.randrange(17) for _ in range(rng.randrange(1, 30))]


def test_a_row_is_rewound_even_behind_what_was_committed() -> None:
    model = RememberingModel()
    drafter = begun(model)
    drafter.propose([row([1, 2, 3, 4, 5, 6])])
    (proposal,) = drafter.propose([row([1, 2, 3])])
    assert list(proposal.tokens) == continuation(model, [1, 2, 3], GREEDY, 4)


def test_rows_with_a_limit_of_none_get_nothing_and_cost_nothing() -> None:
    model = RememberingModel()
    assert begun(model).propose([row([1, 2, 3], 0), row([4], 0, slot=1)]) == [NOTHING, NOTHING]
    assert model.widths == []
    assert begun(model).propose([]) == []


def test_drafts_end_where_the_cache_of_the_drafter_ends() -> None:
    model = RememberingModel()
    drafter = begun(model)
    for length, expected in [(MAX_LENGTH - 2, 3), (MAX_LENGTH, 1), (MAX_LENGTH + 1, 0), (MAX_LENGTH + 9, 0)]:
        (proposal,) = drafter.propose([row([i % 17 for i in range(length)])])
        assert len(proposal.tokens) == expected


def test_ids_behind_the_vocabulary_of_the_target_are_never_drafted() -> None:
    class Padded(RememberingModel):
        def logits(self, hidden: Tensor) -> Tensor:
            logits = super().logits(hidden)
            return torch.cat([logits, torch.full((len(logits), 3), 9.0)], dim=1)

    model = Padded()
    (proposal,) = begun(model, num_tokens=17).propose([row([1, 2, 3], limit=6)])
    assert list(proposal.tokens) == continuation(RememberingModel(), [1, 2, 3], GREEDY, 6)


def test_a_broken_slot_drafts_no_more_and_is_cleared_before_it_is_used_again() -> None:
    model = RememberingModel(broken_slot=1)
    drafter = begun(model)
    good, bad = drafter.propose([row([1, 2, 3]), row([1, 2, 3], slot=1)])
    assert list(good.tokens) == continuation(model, [1, 2, 3], GREEDY, 4)
    assert bad == NOTHING
    model.widths.clear()
    assert drafter.propose([row([1, 2, 3], slot=1)]) == [NOTHING]
    assert model.widths == []
    drafter.begin(1)
    assert model.zeroed == [1]


def test_confidence_is_the_probability_under_the_drafter() -> None:
    model = RememberingModel()
    (proposal,) = begun(model).propose([row([1, 2, 3], limit=1)])
    logits = model.logits(torch.tensor([[model.digest([1, 2, 3])]], dtype=torch.float64))
    assert proposal.confidence == pytest.approx([float(logits.softmax(-1)[0, proposal.tokens[0]])])


SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=77)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), layers=3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_real_drafter_equal_to_the_target_is_accepted_to_the_last_token(directory: Path, sampling: Sampling) -> None:
    settings = {"slots": 3, "max_length": 256, "max_query": 16}
    target, model = load_whole(directory, **settings), load_whole(directory, **settings)
    drafter = begun(model, VOCABULARY, slots=3)
    texts = [
        list(b"The quick brown fox"),
        list(b"x"),
        list(b"jumps over the lazy dog, and over and over" * 2),
    ]
    samplings = [replace(sampling, seed=sampling.seed + slot) for slot in range(3)]
    for slot, text in enumerate(texts):
        text += plain(target, slot, text, samplings[slot], 0, 1)
    for _ in range(8):
        rows = [row(text, 4, slot, samplings[slot]) for slot, text in enumerate(texts)]
        for slot, proposal in enumerate(drafter.propose(rows)):
            following = plain(target, slot, texts[slot], samplings[slot], len(texts[slot]) - 1, 5)
            assert list(proposal.tokens) == following[:4]
            texts[slot] += following


def plain(model: object, slot: int, tokens: list[int], sampling: Sampling, cached: int, count: int) -> list[int]:
    """`count` tokens after `tokens`, one by one; the cache of `slot` holds `cached` of them."""
    out = list(tokens)
    for _ in range(count):
        while cached < len(out):
            chunk = out[cached : cached + 16]
            place = torch.tensor([slot]), torch.tensor([cached])
            hidden = model.forward(torch.tensor([chunk]), *place)  # type: ignore[attr-defined]
            cached += len(chunk)
        logits = model.logits(hidden[:, -1])  # type: ignore[attr-defined]
        out.append(int(choose(logits, SamplingRows.from_rows([sampling]), torch.tensor([len(out)]))))
    return out[len(tokens) :]
