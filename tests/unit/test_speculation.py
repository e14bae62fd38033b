"""Draft lengths are planned for the most tokens per second, from costs and acceptance measured on the way."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.head.acceptance import Acceptance, Calibration
from workers.head.costs import Costs, LinearCost
from workers.head.speculation import (
    Planner,
    RowState,
    goodput,
    period_s,
    plan,
    worth_sending,
)


def measured(
    *,
    link: float = 0.0,
    per_byte: float = 0.0,
    head: tuple[float, float] = (0.0, 0.0),
    tail: tuple[float, float] = (0.0, 0.0),
    draft_step: float = 0.0,
) -> Costs:
    """Costs that measured exactly these lines, over 1 to 64 positions of 100 bytes each."""
    costs = Costs()
    for tokens in (1, 4, 16, 64) * 3:
        costs.observe_round(
            rows=1,
            longest=tokens - 1,
            tokens=tokens,
            draft_steps=tokens - 1,
            draft_s=draft_step * (tokens - 1),
            head_s=head[0] + head[1] * tokens,
            link_s=link + per_byte * 100 * tokens,
            tail_s=tail[0] + tail[1] * tokens,
            bytes_up=100 * tokens,
        )
    return costs


seconds = st.floats(0.0, 0.2)
small = st.floats(0.0, 0.02)
any_costs = st.builds(
    measured,
    link=seconds,
    per_byte=st.floats(0.0, 1e-4),
    head=st.tuples(seconds, small),
    tail=st.tuples(seconds, small),
    draft_step=small,
)
any_row = st.one_of(
    st.builds(RowState.alike, st.floats(0.0, 1.0), st.integers(0, 4)),
    st.builds(RowState.given, st.lists(st.floats(0.0, 1.0), max_size=4)),
)


# -- plan ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.lists(any_row, min_size=1, max_size=3), any_costs, st.integers(1, 4), st.booleans())
def test_no_other_lengths_have_a_higher_goodput(rows: list[RowState], costs: Costs, lanes: int, drafted: bool) -> None:
    chosen = plan(rows, costs, lanes=lanes, drafted=drafted)
    best = max(
        goodput(lengths, rows, costs, lanes=lanes, drafted=drafted)
        for lengths in itertools.product(*(range(len(row.chances) + 1) for row in rows))
    )
    assert all(0 <= length <= len(row.chances) for row, length in zip(rows, chosen, strict=True))
    assert goodput(chosen, rows, costs, lanes=lanes, drafted=drafted) == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(any_costs, st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(1, 4))
def test_a_likelier_row_never_gets_a_shorter_draft(costs: Costs, one: float, other: float, lanes: int) -> None:
    worse, better = sorted((one, other))
    short, long = plan([RowState.alike(worse, 8), RowState.alike(better, 8)], costs, lanes=lanes)
    assert short <= long


def test_the_draft_grows_with_acceptance_and_with_the_round_trip() -> None:
    by_acceptance = [
        plan([RowState.alike(rate / 20, 32)], measured(link=0.086, head=(0.005, 0.001), tail=(0.005, 0.001)))[0]
        for rate in range(20)
    ]
    by_link = [
        plan([RowState.alike(0.8, 32)], measured(link=rtt, head=(0.005, 0.001), tail=(0.005, 0.001)))[0]
        for rtt in (0.0, 0.02, 0.086, 0.2, 0.5)
    ]
    assert by_acceptance == sorted(by_acceptance)
    assert by_link == sorted(by_link)
    assert by_acceptance[0] == 0 < by_acceptance[-1]


@pytest.mark.parametrize(("acceptance", "wanted"), [(0.7, 7), (0.9, 18)])
def test_one_row_over_an_ocean_drafts_far_more_than_usual(acceptance: float, wanted: int) -> None:
    """86 ms of round trip, and a millisecond of compute per token."""
    costs = measured(link=0.086, head=(0.003, 0.0005), tail=(0.003, 0.0005), draft_step=0.001)
    (length,) = plan([RowState.alike(acceptance, 32)], costs)
    assert abs(length - wanted) <= 2


def test_many_rows_on_a_processor_that_is_busy_anyway_draft_next_to_nothing() -> None:
    costs = measured(link=0.086, head=(0.02, 0.03), tail=(0.02, 0.03))
    assert plan([RowState.alike(0.6, 16)] * 32, costs) == [0] * 32


def test_once_lanes_hide_the_link_a_draft_must_earn_its_compute() -> None:
    costs = measured(link=0.2, head=(0.002, 0.002), tail=(0.002, 0.002))
    rows = [RowState.alike(0.7, 16)]
    alone, hidden = plan(rows, costs), plan(rows, costs, lanes=60)
    assert alone[0] >= 4
    assert hidden == [0] or hidden == [1]
    assert period_s(1, 0, 1, costs, lanes=60) == pytest.approx(0.004, rel=0.05)


def test_a_drafters_steps_are_not_asked_for_what_they_would_not_earn_but_what_is_drafted_is_sent() -> None:
    costs = measured(link=0.01, head=(0.01, 0.0), tail=(0.01, 0.0), draft_step=0.05)
    rows = [RowState.alike(0.5, 8)]
    assert plan(rows, costs) == [0]
    assert plan(rows, costs, drafted=True) == [8]


def test_a_narrow_wire_carries_only_likely_tokens() -> None:
    wide = measured(link=0.02, head=(0.01, 0.0), tail=(0.01, 0.0), per_byte=1e-7)
    narrow = measured(link=0.02, head=(0.01, 0.0), tail=(0.01, 0.0), per_byte=1e-4)
    rows = [RowState.alike(0.9, 8), RowState.alike(0.3, 8)]
    assert plan(rows, wide, drafted=True)[1] > 0
    assert plan(rows, narrow, drafted=True)[0] > plan(rows, narrow, drafted=True)[1]
    assert sum(plan(rows, narrow, drafted=True)) < sum(plan(rows, wide, drafted=True))


def test_no_rows_make_no_plan() -> None:
    assert plan([], measured()) == []


def test_what_is_expected_of_a_row_is_the_known_sum() -> None:
    rows = [RowState.alike(0.8, 5)]
    costs = measured(head=(1.0, 0.0))
    assert goodput([5], rows, costs) == pytest.approx((1 - 0.8**6) / (1 - 0.8))


# -- costs --------------------------------------------------------------------------------------------------------


def test_a_line_is_found_through_noise_and_outliers() -> None:
    rng, cost = random.Random(1), LinearCost()
    for _ in range(300):
        x = rng.choice((1, 2, 5, 17, 40))
        outlier = 50.0 if rng.random() < 0.05 else 1.0
        cost.observe(x, (0.01 + 0.002 * x) * rng.uniform(0.9, 1.1) * outlier)
    for x in (1, 17, 40):
        assert cost(x) == pytest.approx(0.01 + 0.002 * x, rel=0.1)


def test_a_size_not_used_for_long_still_gives_the_slope() -> None:
    cost = LinearCost()
    for x in [1, 17] * 5 + [1] * 2000:
        cost.observe(x, 0.01 + 0.002 * x)
    assert cost.slope == pytest.approx(0.002, rel=0.01)


def test_a_change_is_followed_within_a_few_rounds() -> None:
    cost = LinearCost()
    for _ in range(100):
        cost.observe(4, 0.1)
    for _ in range(6):
        cost.observe(4, 0.3)
    assert cost(4) == pytest.approx(0.3)


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 10)), min_size=1, max_size=60))
def test_a_cost_is_never_negative_and_never_falls(points: list[tuple[float, float]]) -> None:
    cost = LinearCost()
    for x, y in points:
        cost.observe(x, y)
    assert 0 <= cost(0) <= cost(1) <= cost(1000)
    assert cost.slope >= 0


def test_waiting_in_line_for_a_busy_half_is_not_taken_for_the_link() -> None:
    costs = measured(link=0.02, head=(0.01, 0.01), tail=(0.01, 0.01))
    for _ in range(50):
        costs.observe_round(
            rows=4, longest=1, tokens=8, draft_steps=0, draft_s=0.0, head_s=0.09, link_s=0.54, tail_s=0.09,
            bytes_up=800, lanes=8,
        )  # fmt: skip
    assert costs.link_s(800) < 0.03


# -- acceptance and confidence ------------------------------------------------------------------------------------


def accepted_of(rng: random.Random, chance: float, drafted: int) -> int:
    return next((depth for depth in range(drafted) if rng.random() >= chance), drafted)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_acceptance_is_learned_and_follows_a_change(chance: float) -> None:
    rng, acceptance = random.Random(0), Acceptance(memory=64)
    for _ in range(400):
        acceptance.observe(4, accepted_of(rng, 1 - chance, 4))
    assert acceptance.rate == pytest.approx(1 - chance, abs=0.12)
    for _ in range(400):
        acceptance.observe(4, accepted_of(rng, chance, 4))
    assert acceptance.rate == pytest.approx(chance, abs=0.12)


def test_a_new_row_is_expected_to_do_as_the_batch_did() -> None:
    batch = Acceptance(memory=512)
    for _ in range(100):
        batch.observe(4, 4)
    row = Acceptance(batch)
    assert row.rate == pytest.approx(batch.rate)
    for _ in range(20):
        row.observe(4, 0)
    assert row.rate < 0.3 < batch.rate


def test_acceptance_by_depth_knows_drafts_that_are_right_to_the_end_or_not_at_all() -> None:
    acceptance = Acceptance()
    for number in range(200):
        acceptance.observe(6, 6 if number % 2 else 0)
    chances = acceptance.conditional(6)
    assert chances[0] == pytest.approx(0.5, abs=0.1)
    assert min(chances[1:]) > 0.9


def test_confidence_is_worth_what_it_turned_out_to_be() -> None:
    rng, calibration = random.Random(0), Calibration()
    for _ in range(500):
        calibration.observe([0.9] * 4, accepted_of(rng, 0.4, 4))
        calibration.observe([0.3] * 4, accepted_of(rng, 0.8, 4))
    assert calibration.probability(0.9) == pytest.approx(0.4, abs=0.1)
    assert calibration.probability(0.3) == pytest.approx(0.8, abs=0.1)
    assert 0.6 <= calibration.probability(0.6) < 0.8


def test_a_draft_is_cut_where_it_is_unlikely_to_be_right_so_far() -> None:
    assert worth_sending([0.9, 0.5, 0.1, 0.9], 0.1) == 2
    assert worth_sending([0.9, 0.9], 0.1) == 2
    assert worth_sending([0.01], 0.1) == 0
    assert worth_sending([]) == 0


# -- the planner --------------------------------------------------------------------------------------------------


@dataclass
class World:
    """Halves and a link of known costs, and rows of a known acceptance. Only the clock is simulated."""

    rtt: float
    base: float
    per_position: float
    draft_step: float
    acceptance: float
    rows: int
    lanes: int
    bytes_per_s: float = 5e7
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.clock = 0.0
        self.head_free = self.tail_free = 0.0
        self.ready = [0.0] * self.lanes
        self.expected_tokens = 0.0

    def noisy(self, value: float) -> float:
        return value * self.rng.uniform(0.9, 1.1) * (20.0 if self.rng.random() < 0.01 else 1.0)

    def round(self, lengths: list[int], steps: int, costs: Costs | None = None) -> None:
        """One round of the lane that is ready first. Measured with noise, charged without."""
        lane = min(range(self.lanes), key=lambda index: self.ready[index])
        positions, tokens = self.rows * (1 + max(lengths)), self.rows + sum(lengths)
        compute = self.base + self.per_position * positions
        draft = self.draft_step * steps
        begun = max(self.ready[lane], self.head_free)
        self.head_free = begun + draft + compute
        arrived = self.head_free + self.rtt / 2 + tokens * 2304 / self.bytes_per_s
        self.tail_free = max(arrived, self.tail_free) + compute
        self.ready[lane] = self.clock = self.tail_free + self.rtt / 2
        self.expected_tokens += sum(sum(self.acceptance**depth for depth in range(length + 1)) for length in lengths)
        if costs is not None:
            costs.observe_round(
                rows=self.rows,
                longest=max(lengths),
                tokens=tokens,
                draft_steps=steps,
                draft_s=self.noisy(draft),
                head_s=self.noisy(compute),
                link_s=self.noisy(self.clock - begun - draft - 2 * compute),
                tail_s=self.noisy(compute),
                bytes_up=tokens * 2304,
                lanes=self.lanes,
            )

    @property
    def tokens_per_s(self) -> float:
        return self.expected_tokens / self.clock


def fixed(world: World, length: int, rounds: int) -> float:
    for _ in range(rounds):
        world.round([length] * world.rows, length)
    return world.tokens_per_s


def adaptive(world: World, rounds: int, planner: Planner) -> float:
    slots = list(range(world.rows))
    for slot in slots:
        planner.begin(slot)
    for _ in range(rounds):
        limits = [planner.limit(10_000) for _ in slots]
        efforts = planner.effort(slots, limits, world.lanes)
        confidence = [[0.7] * effort for effort in efforts]
        lengths = planner.select(slots, confidence, world.lanes)
        world.round(lengths, max(efforts), planner.costs)
        for slot, length in zip(slots, lengths, strict=True):
            planner.verified(slot, [0.7] * length, accepted_of(world.rng, world.acceptance, length))
    return world.tokens_per_s


#: seconds: compute of a round and of each of its positions, in either half; a drafter's step
MACHINES = {"tiny": (0.0005, 0.00002, 0.0), "gpu": (0.01, 0.0004, 0.002), "cpu": (0.03, 0.02, 0.005)}


@pytest.mark.parametrize(("rows", "lanes"), [(1, 1), (4, 6)])
@pytest.mark.parametrize("machine", sorted(MACHINES))
@pytest.mark.parametrize("acceptance", [0.2, pytest.param(0.6, marks=pytest.mark.slow), 0.85])
@pytest.mark.parametrize("rtt", [0.0, 0.086, pytest.param(0.2, marks=pytest.mark.slow)])
def test_adaptive_drafts_are_as_fast_as_the_best_fixed_length(
    rtt: float, acceptance: float, machine: str, rows: int, lanes: int
) -> None:
    def world() -> World:
        return World(rtt, *MACHINES[machine], acceptance, rows, lanes)

    best = max(fixed(world(), length, 60) for length in range(17))
    mine, planner = world(), Planner(16)
    adaptive(mine, 100, planner)
    clock, tokens = mine.clock, mine.expected_tokens
    adaptive(mine, 300, planner)
    assert (mine.expected_tokens - tokens) / (mine.clock - clock) >= 0.95 * best


def test_acceptance_is_measured_again_after_a_long_time_without_drafts() -> None:
    planner = Planner(16)
    world = World(0.0, 0.001, 0.02, 0.0, 0.05, 1, 1)
    adaptive(world, 400, planner)
    assert planner.effort([0], [16]) == [0]
    world.acceptance, world.base, before = 0.95, 0.2, world.expected_tokens
    adaptive(world, 1000, planner)
    assert (world.expected_tokens - before) / 1000 > 3


def test_probes_cost_little_where_drafts_never_pay() -> None:
    world = World(0.0, 0.001, 0.02, 0.005, 0.1, 8, 1)
    best = fixed(World(0.0, 0.001, 0.02, 0.005, 0.1, 8, 1), 0, 100)
    planner = Planner(16)
    adaptive(world, 100, planner)
    clock, tokens = world.clock, world.expected_tokens
    adaptive(world, 1000, planner)
    assert (world.expected_tokens - tokens) / (world.clock - clock) >= 0.98 * best


@given(st.integers(0, 40), st.integers(1, 16))
def test_a_limit_leaves_room_for_the_verdicts_own_token(remaining: int, most: int) -> None:
    assert 0 <= Planner(most).limit(remaining) <= max(0, min(most, remaining - 1))


def test_a_slot_used_again_starts_from_the_batch() -> None:
    planner = Planner(16)
    planner.begin(0)
    for _ in range(50):
        planner.verified(0, [0.5] * 4, 0)
    planner.end(0)
    planner.verified(0, [0.5], 1)  # an answer that came too late
    planner.begin(0)
    assert planner.effort([0], [3]) == [3]
