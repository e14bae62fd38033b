"""The hybrid takes a good suffix match and asks the model elsewhere, whose cache has no holes for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from relay.messages import Sampling
from tests.unit.test_drafter_model import GREEDY, MAX_LENGTH, RememberingModel, continuation
from workers.head.drafters.drafter import NOTHING, DraftRow, Proposal
from workers.head.drafters.hybrid import HybridDrafter, is_good
from workers.head.drafters.model import ModelDrafter
from workers.head.drafters.suffix import SuffixDrafter

SURE = Proposal((1, 2, 3), (0.9, 0.9, 0.9))
UNSURE = Proposal((4,), (0.5,))
MODELLED = Proposal((7, 8), (0.6, 0.6))


@dataclass
class Scripted:
    """Answers by slot, and remembers what it was asked."""

    answers: dict[int, Proposal]
    asked: list[int] = field(default_factory=list)
    ends: list[tuple[str, int]] = field(default_factory=list)

    def begin(self, slot: int) -> None:
        self.ends.append(("begin", slot))

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.asked += [row.slot for row in rows]
        return [self.answers.get(row.slot, NOTHING) for row in rows]

    def end(self, slot: int) -> None:
        self.ends.append(("end", slot))


def row(tokens: Sequence[int], limit: int = 4, slot: int = 0, effort: int | None = None) -> DraftRow:
    return DraftRow(slot, tokens, GREEDY, limit, effort)


def test_the_model_is_asked_only_for_rows_without_a_good_match() -> None:
    suffix, model = Scripted({0: SURE, 1: UNSURE}), Scripted(dict.fromkeys(range(3), MODELLED))
    rows = [row([5], slot=slot) for slot in range(3)]
    assert HybridDrafter(suffix, model).propose(rows) == [SURE, MODELLED, MODELLED]
    assert model.asked == [1, 2]


def test_a_poor_match_is_better_than_a_model_that_has_nothing_to_say() -> None:
    assert HybridDrafter(Scripted({0: UNSURE}), Scripted({})).propose([row([5])]) == [UNSURE]


def test_a_row_not_worth_the_models_work_gets_what_the_suffix_part_has() -> None:
    model = Scripted({0: MODELLED, 1: MODELLED})
    rows = [row([5], effort=0), row([5], slot=1, limit=0)]
    assert HybridDrafter(Scripted({0: UNSURE}), model).propose(rows) == [UNSURE, NOTHING]
    assert model.asked == []


def test_both_parts_follow_the_life_of_a_slot() -> None:
    suffix, model = Scripted({}), Scripted({})
    drafter = HybridDrafter(suffix, model)
    drafter.begin(3)
    drafter.end(3)
    assert suffix.ends == model.ends == [("begin", 3), ("end", 3)]


def test_effort_limits_the_models_steps_but_not_the_suffix_part() -> None:
    model = RememberingModel()
    drafter = HybridDrafter(SuffixDrafter(), ModelDrafter(model, 17))
    drafter.begin(0)
    drafter.begin(1)
    loop = [1, 2, 3, 4] * 5
    looped, modelled = drafter.propose([row(loop, 8, 0, 2), row([9, 8, 7], 8, 1, 2)])
    assert looped.tokens == (1, 2, 3, 4, 1, 2, 3, 4)
    assert list(modelled.tokens) == continuation(model, [9, 8, 7], GREEDY, 2)
    assert model.widths == [2, 2, 1] or model.widths == [1, 2, 1]


@pytest.mark.parametrize("seed", range(6))
def test_the_models_drafts_stay_right_however_many_rounds_the_suffix_part_drafted(seed: int) -> None:
    """Texts that loop for a while and then do not: every draft of the model is the target's own continuation."""
    rng = random.Random(seed)
    model = RememberingModel()
    suffix = SuffixDrafter()
    drafter = HybridDrafter(suffix, ModelDrafter(model, 17))
    twin = SuffixDrafter()
    sampling = [GREEDY, Sampling(1.5, 0, 1.0, 0.0, 1)]
    sources = {"suffix": 0, "model": 0}
    texts = {slot: [rng.randrange(17) for _ in range(3)] for slot in range(2)}
    for slot in texts:
        drafter.begin(slot)
        twin.begin(slot)
    for _ in range(40):
        rows = [DraftRow(slot, text, sampling[slot], rng.randrange(6)) for slot, text in texts.items()]
        for asked, proposal, matched in zip(rows, drafter.propose(rows), twin.propose(rows), strict=True):
            slot, right = asked.slot, continuation(model, list(asked.tokens), asked.sampling, asked.limit)
            if is_good(matched):
                assert proposal == matched
                sources["suffix"] += 1
            elif asked.limit:
                assert list(proposal.tokens) == right
                sources["model"] += 1
            accepted = right[: rng.randrange(asked.limit + 1)]
            repeated = asked.tokens[-9:] if rng.random() < 0.2 else [rng.randrange(17)]
            texts[slot] = [*asked.tokens, *accepted, *repeated]
            if len(texts[slot]) > MAX_LENGTH - 20:
                drafter.begin(slot)
                twin.begin(slot)
                texts[slot] = [rng.randrange(17) for _ in range(3)]
    assert min(sources.values()) > 5
