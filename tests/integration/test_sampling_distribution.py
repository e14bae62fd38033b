"""Sampled texts have exactly the target's distribution, and the check that says so finds wrong rules.

The target is a table: the next token's logits for every pair of last two tokens, over 8 tokens. The probability of
each of the 512 continuations of three tokens is computed from it in double precision with the filters of
transformers, and compared with 20,000 continuations drawn with seeds 0..19999. One row of a batch is one seed. The
rounds are driven by the product's own `choose` and `verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from relay.messages import Sampling
from workers.engine import noise
from workers.engine.sampling import SamplingRows, choose, filtered
from workers.engine.verify import verify

VOCAB = 8
LENGTH = 3
NUM_SEEDS = 20_000
PROMPT = (2, 5)

#: a right rule stays above this (the seeds are fixed: it is not a matter of luck), a wrong one falls far below
ALPHA = 1e-3
CERTAINLY_WRONG = 1e-9

PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
FILTERED = Sampling(temperature=1.4, top_k=6, top_p=0.9, min_p=0.08, seed=0)
SAMPLINGS = pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])


@dataclass(frozen=True)
class Table:
    """A model: logits of the next token for every (token before last, last token)."""

    logits: Tensor  # [vocab, vocab, vocab]

    @classmethod
    def random(cls, seed: int, scale: float = 1.2) -> Table:
        return cls(torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale)

    def after(self, texts: Tensor) -> Tensor:
        """Logits [rows, vocab] after texts [rows, tokens]."""
        return self.logits[texts[:, -2], texts[:, -1]]


TARGET = Table.random(1)
DRAFTERS = {
    "none": TARGET,
    "matching": TARGET,
    "similar": Table(TARGET.logits + Table.random(2, 0.5).logits),
    "unrelated": Table.random(3),
}

#: commits tokens after texts [rows, tokens] from drafts [rows, K]: (tokens [rows, K + 1], how many of them [rows])
Rule = Callable[[Tensor, Tensor, SamplingRows], tuple[Tensor, Tensor]]


def draft(texts: Tensor, drafter: Table, rows: SamplingRows, length: int) -> Tensor:
    """[rows, length] tokens, each chosen as the drafters of the product choose."""
    for _ in range(length):
        positions = torch.full((len(texts),), texts.shape[1])
        texts = torch.cat([texts, choose(drafter.after(texts), rows, positions)[:, None]], dim=1)
    return texts[:, texts.shape[1] - length :]


def target_choices(texts: Tensor, drafts: Tensor, rows: SamplingRows) -> Tensor:
    """[rows, K + 1] tokens that the target chooses behind every prefix of the draft."""
    length = texts.shape[1]
    extended = torch.cat([texts, drafts], dim=1)
    places = range(drafts.shape[1] + 1)
    each = [
        choose(TARGET.after(extended[:, : length + i]), rows, torch.full((len(texts),), length + i)) for i in places
    ]
    return torch.stack(each, dim=1)


def shared_noise(texts: Tensor, drafts: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """The product's rule."""
    choices = target_choices(texts, drafts, rows)
    lengths = torch.full((len(texts),), drafts.shape[1])
    return choices, verify(choices, drafts, lengths) + 1


@cache
def seeded(sampling: Sampling) -> list[Sampling]:
    return [replace(sampling, seed=seed) for seed in range(NUM_SEEDS)]


@cache
def continuations(
    drafter: str, draft_length: int, sampling: Sampling, rule: Rule = shared_noise
) -> tuple[Tensor, float]:
    """Tokens [seeds, LENGTH], and the mean number of tokens per round.

    Rows of one batch stand at different lengths after the first round, so each round takes rows of one length.
    """
    texts = torch.tensor(PROMPT).repeat(NUM_SEEDS, 1)
    done = torch.zeros(NUM_SEEDS, LENGTH, dtype=torch.int64)
    filled = torch.zeros(NUM_SEEDS, dtype=torch.int64)
    committed = rounds = 0
    for length in range(LENGTH):
        mine = (filled == length).nonzero()[:, 0]
        if len(mine) == 0:
            continue
        rows = SamplingRows.from_rows([seeded(sampling)[seed] for seed in mine.tolist()])
        so_far = torch.cat([texts[mine], done[mine, :length]], dim=1)
        tokens, counts = rule(so_far, draft(so_far, DRAFTERS[drafter], rows, draft_length), rows)
        for place in range(min(tokens.shape[1], LENGTH - length)):
            kept = mine[counts > place]
            done[kept, length + place] = tokens[counts > place, place]
        filled[mine] = torch.minimum(filled[mine] + counts, torch.tensor(LENGTH))
        committed += int(counts.sum())
        rounds += len(mine)
    return done, committed / rounds


@cache
def expected_joint(sampling: Sampling) -> np.ndarray:
    """Probability of each continuation, [vocab ** LENGTH], in double precision."""
    conditional = torch.empty(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    for before in range(VOCAB):
        scores = TARGET.logits[before].double()
        warpers = [TemperatureLogitsWarper(sampling.temperature)]
        warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
        for warper in warpers:
            scores = warper(None, scores)
        conditional[before] = scores.softmax(dim=-1)
    first = conditional[PROMPT[0], PROMPT[1]]
    second = conditional[PROMPT[1]]
    return torch.einsum("a,ab,abc->abc", first, second, conditional).flatten().numpy()


def p_value(tokens: Tensor, sampling: Sampling) -> float:
    """Chi-square of the drawn continuations; cells that expect fewer than five are pooled."""
    code = (tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2]
    observed = np.bincount(code.numpy(), minlength=VOCAB**LENGTH)
    expected = expected_joint(sampling) * len(tokens)
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    assert keep.sum() > 100 or sampling is FILTERED
    return float(stats.chisquare(observed[keep], expected[keep], sum_check=False).pvalue)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@SAMPLINGS
def test_plain_decoding_has_the_distribution_of_the_target(sampling: Sampling) -> None:
    tokens, per_round = continuations("none", 0, sampling)
    assert per_round == 1
    assert p_value(tokens, sampling) > ALPHA


@SAMPLINGS
@pytest.mark.parametrize("drafter", ["matching", "similar", "unrelated"])
def test_speculative_decoding_has_the_distribution_of_the_target(drafter: str, sampling: Sampling) -> None:
    tokens, per_round = continuations(drafter, 4, sampling)
    assert per_round > 1
    assert p_value(tokens, sampling) > ALPHA


@SAMPLINGS
@pytest.mark.parametrize("drafter", ["matching", "similar", "unrelated"])
def test_every_seed_gives_the_same_tokens_with_and_without_drafts(drafter: str, sampling: Sampling) -> None:
    plain, _ = continuations("none", 0, sampling)
    for draft_length in (1, 4):
        speculative, _ = continuations(drafter, draft_length, sampling)
        assert torch.equal(speculative, plain)


def test_the_noise_couples_drafter_and_target() -> None:
    _, matching = continuations("matching", 4, PLAIN)
    _, similar = continuations("similar", 4, PLAIN)
    _, unrelated = continuations("unrelated", 4, PLAIN)
    assert matching == 5
    assert unrelated < similar < matching


def ratio_test_on_shared_noise(texts: Tensor, drafts: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Wrong: accept with probability p/q although drafter and target share their noise."""
    choices = target_choices(texts, drafts, rows)
    extended = torch.cat([texts, drafts], dim=1)
    going = torch.ones(len(texts), dtype=torch.bool)
    counts = torch.ones(len(texts), dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for place in range(drafts.shape[1]):
        before, token = extended[:, : texts.shape[1] + place], drafts[:, place : place + 1]
        p = filtered(TARGET.after(before), rows).softmax(-1).gather(1, token)[:, 0]
        q = filtered(DRAFTERS["unrelated"].after(before), rows).softmax(-1).gather(1, token)[:, 0]
        accepted = torch.rand(len(texts), generator=generator) < p / q
        choices[:, place] = torch.where(going & accepted, token[:, 0], choices[:, place])
        going &= accepted
        counts += going
    return choices, counts


def noise_of_the_base_position(texts: Tensor, drafts: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Wrong: every token of a round is chosen with the noise of the round's first one."""
    length = texts.shape[1]
    extended = torch.cat([texts, drafts], dim=1)
    each = [
        choose(TARGET.after(extended[:, : length + i]), rows, torch.full((len(texts),), length))
        for i in range(drafts.shape[1] + 1)
    ]
    choices = torch.stack(each, dim=1)
    return choices, verify(choices, drafts, torch.full((len(texts),), drafts.shape[1])) + 1


def noise_of_the_token_before(texts: Tensor, drafts: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Wrong: the target's own token after a refused or finished draft reuses the noise of the draft's last place."""
    choices, counts = shared_noise(texts, drafts, rows)
    extended = torch.cat([texts, drafts], dim=1)
    for place in range(1, drafts.shape[1] + 1):
        length = texts.shape[1] + place
        shifted = choose(TARGET.after(extended[:, :length]), rows, torch.full((len(texts),), length - 1))
        choices[:, place] = torch.where(counts == place + 1, shifted, choices[:, place])
    return choices, counts


def unverified_draft(texts: Tensor, drafts: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Wrong: the first drafted token is taken as it is."""
    choices, counts = shared_noise(texts, drafts, rows)
    choices[:, 0] = drafts[:, 0]
    return choices, counts.clamp(min=1)


WRONG_RULES: list[Rule] = [
    ratio_test_on_shared_noise,
    noise_of_the_base_position,
    noise_of_the_token_before,
    unverified_draft,
]


@SAMPLINGS
@pytest.mark.parametrize("rule", WRONG_RULES, ids=lambda rule: rule.__name__)
def test_the_check_finds_a_wrong_rule(rule: Rule, sampling: Sampling) -> None:
    tokens, _ = continuations("unrelated", 4, sampling, rule)
    assert p_value(tokens, sampling) < CERTAINLY_WRONG


@SAMPLINGS
def test_the_check_finds_noise_that_is_not_gumbel(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    fair = noise.gumbel
    monkeypatch.setattr(noise, "gumbel", lambda *place: fair(*place) * 0.85)
    tokens, _ = continuations.__wrapped__("none", 0, sampling)
    assert p_value(tokens, sampling) < CERTAINLY_WRONG
