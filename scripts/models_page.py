"""Write the table of `docs/models.md`. `python -m scripts.models_page` or `make docs`.

Memory is computed as a head and a tail compute it; speeds are what the planner's cost model expects of times that are
assumed (`Card`, `Link`), not measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import click

from scripts.model_shapes import (
    LLAMA31_8B,
    LLAMA32_1B,
    MISTRAL_7B,
    QWEN3_06B,
    QWEN3_8B,
    QWEN3_14B,
    QWEN25_05B,
    QWEN25_7B,
    QWEN25_14B,
    Shape,
)
from workers.engine.quantization import Quantization
from workers.engine.sizes import ModelSizes, sizes_of
from workers.engine.slots import slots_that_fit
from workers.head.costs import Costs, LinearCost
from workers.head.drafters import CATCH_UP_CHUNK
from workers.head.speculation import RowState, goodput, plan
from workers.room import FORWARD_POSITIONS, RESERVE_BYTES
from workers.settings import MAX_QUERY, SPLIT_CHUNK

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
#: what stands around the table on the page
BEGIN, END = "<!-- table: made by `make docs` -->", "<!-- end of table -->"
#: the longest draft that is considered, and most lanes: the defaults
MOST_DRAFTED, MOST_LANES = 16, 8
#: jobs at a time whose throughput the table tells
MANY = 32


@dataclass(frozen=True, slots=True)
class Card:
    """An assumed GPU."""

    #: bytes free for shardq
    free_bytes: float = 15.6e9
    #: bytes and operations per second that are reached: shares of the T4's published 320 GB/s and 65 Tflop/s
    bytes_per_s: float = 0.6 * 320e9
    flops_per_s: float = 0.4 * 65e12
    #: bytes read for a weight in nf4, which is expanded before it is multiplied
    nf4_bytes: float = 2.5

    def forward_s(self, weight_bytes: int, num_weights: int, tokens: int, quantization: Quantization) -> float:
        """One forward of so many tokens through so many weights."""
        num_bytes = num_weights * self.nf4_bytes if quantization == "nf4" else weight_bytes
        return num_bytes / self.bytes_per_s + 2 * num_weights * tokens / self.flops_per_s


@dataclass(frozen=True, slots=True)
class Link:
    """An assumed way from head to tail and back."""

    rtt_s: float = 0.086
    bytes_per_s: float = 64e6 / 8


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model on two cards."""

    target: Shape
    split: int
    drafter: Shape | None
    #: probability, guessed, that a drafted token is right if those before it were
    acceptance: float
    quantization: Quantization = "none"
    max_length: int = 2048


RECIPES = (
    Recipe(QWEN25_7B, 14, QWEN25_05B, 0.77),
    Recipe(QWEN25_14B, 25, QWEN25_05B, 0.77, "nf4"),
    Recipe(LLAMA31_8B, 16, LLAMA32_1B, 0.77),
    Recipe(MISTRAL_7B, 16, None, 0.4),
    Recipe(QWEN3_8B, 18, QWEN3_06B, 0.77),
    Recipe(QWEN3_14B, 20, QWEN3_06B, 0.77, "nf4"),
)


@dataclass(frozen=True, slots=True)
class Sized:
    """A recipe and what its models take."""

    recipe: Recipe
    sizes: ModelSizes
    #: the target unquantised
    plain: ModelSizes
    drafter: ModelSizes | None

    @classmethod
    def of(cls, recipe: Recipe) -> Sized:
        """Computed from the shapes alone."""
        config = recipe.target.config()
        drafter = sizes_of(recipe.drafter.config(), "float16", "none") if recipe.drafter else None
        plain = sizes_of(config, "float16", "none")
        return cls(recipe, sizes_of(config, "float16", recipe.quantization), plain, drafter)

    @property
    def drafter_bytes(self) -> int:
        """Weights of the drafter."""
        if self.drafter is None or self.recipe.drafter is None:
            return 0
        return self.drafter.whole(tied=self.recipe.drafter.tied)


def head_slots(sized: Sized, card: Card, *, beside_drafter: bool = False) -> int:
    """Slots that fit the head's card, with the drafter on another one or beside the head."""
    sizes, recipe = sized.sizes, sized.recipe
    slot = sizes.slot(recipe.split, recipe.max_length + SPLIT_CHUNK)
    taken = FORWARD_POSITIONS * sizes.layer_activations + RESERVE_BYTES["cuda"] + sizes.head(recipe.split)
    if beside_drafter and sized.drafter is not None:
        taken += sized.drafter_bytes
        slot += sized.drafter.slot(sized.drafter.num_layers, recipe.max_length + CATCH_UP_CHUNK)
    return slots_that_fit(int(card.free_bytes) - taken, slot)


def tail_slots(sized: Sized, card: Card) -> int:
    """Slots that fit the tail's card."""
    sizes, recipe = sized.sizes, sized.recipe
    slot = sizes.slot(sizes.num_layers - recipe.split, recipe.max_length + MAX_QUERY)
    margin = FORWARD_POSITIONS * (sizes.layer_activations + sizes.logit_activations) + RESERVE_BYTES["cuda"]
    return slots_that_fit(int(card.free_bytes) - margin - sizes.tail(recipe.split), slot)


def costs_of(sized: Sized, card: Card, link: Link) -> Costs:
    """The planner's costs after rounds that took what is assumed."""
    costs = Costs(drafts_apart=sized.drafter is not None)
    for rows in (1, 4, 16, MANY):
        for longest in (1, 4, MOST_DRAFTED):
            tokens = rows * (1 + longest)
            num_bytes = tokens * sized.recipe.target.hidden * 2
            head_s, tail_s = _halves_s(sized, card, tokens)
            for _ in range(LinearCost.ENOUGH):
                costs.observe_round(
                    rows=rows,
                    longest=longest,
                    tokens=tokens,
                    draft_steps=longest,
                    draft_s=longest * _draft_step_s(sized.drafter, card, rows),
                    head_s=head_s,
                    link_s=link.rtt_s + 2 * num_bytes / link.bytes_per_s,
                    tail_s=tail_s,
                    bytes_up=num_bytes,
                )
    return costs


def _halves_s(sized: Sized, card: Card, tokens: int) -> tuple[float, float]:
    """What a round of so many tokens takes in head and tail."""
    quantization, split = sized.recipe.quantization, sized.recipe.split
    weights = sized.plain.layer // 2
    rest = sized.sizes.num_layers - split
    head_s = card.forward_s(split * sized.sizes.layer, split * weights, tokens, quantization)
    tail_s = card.forward_s(rest * sized.sizes.layer, rest * weights, tokens, quantization)
    return head_s, tail_s + card.forward_s(sized.sizes.lm_head, sized.sizes.lm_head // 2, tokens, "none")


def _draft_step_s(drafter: ModelSizes | None, card: Card, rows: int) -> float:
    if drafter is None:
        return 0.0
    weight_bytes = drafter.num_layers * drafter.layer + drafter.lm_head
    return card.forward_s(weight_bytes, weight_bytes // 2, rows, "none")


def tokens_per_s(sized: Sized, jobs: int, card: Card, link: Link) -> tuple[float, int]:
    """Expected tokens per second of so many jobs at a time, with the best number of lanes; and the draft length."""
    costs = costs_of(sized, card, link)
    best, drafted = 0.0, 0
    for lanes in range(1, min(jobs, MOST_LANES) + 1):
        rows = [RowState.alike(sized.recipe.acceptance, MOST_DRAFTED)] * -(-jobs // lanes)
        lengths = plan(rows, costs, lanes=lanes)
        if (found := goodput(lengths, rows, costs, lanes=lanes)) > best:
            best, drafted = found, max(lengths)
    return best, drafted


def table() -> str:
    """The table, markers included."""
    lines = [
        "| model | quantisation | split | weights, GB: head / tail / drafter | slots: head (drafter beside it) / tail "
        "| 1 job, tokens/s | all slots, at most 32 jobs, tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(_cells(Sized.of(recipe), Card(), Link()))} |" for recipe in RECIPES]
    return "\n".join([BEGIN, "", *lines, "", END])


def _cells(sized: Sized, card: Card, link: Link) -> list[str]:
    recipe, sizes = sized.recipe, sized.sizes
    alone, beside = head_slots(sized, card), head_slots(sized, card, beside_drafter=True)
    tail = tail_slots(sized, card)
    jobs = min(alone, tail, MANY)
    one, many = tokens_per_s(sized, 1, card, link), tokens_per_s(sized, jobs, card, link)
    weights = (sizes.head(recipe.split), sizes.tail(recipe.split), sized.drafter_bytes)
    return [
        recipe.target.hub_id.partition("/")[2],
        recipe.quantization,
        f"{recipe.split} of {recipe.target.layers}",
        " / ".join(f"{number / 1e9:.2f}" if number else "–" for number in weights),
        f"{alone} ({beside}) / {tail}" if recipe.drafter else f"{alone} / {tail}",
        f"{one[0]:.0f}, K = {one[1]}",
        f"{many[0]:.0f} with {jobs}, K = {many[1]}",
    ]


def with_table(text: str) -> str:
    """The page with its table made anew."""
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: table(), text, flags=re.DOTALL)


def main() -> None:
    """Write the page's table."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    click.echo(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
