"""How rows share lanes, and how many lanes measured times ask for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.head.costs import Costs
from workers.head.lanes import Lanes, num_lanes


def costs(*, fixed_s: float, row_s: float, link_s: float) -> Costs:
    """Costs of halves that take `fixed_s` for a forward and `row_s` for each row of it."""
    measured = Costs()
    for rows in (1, 2, 4, 8, 16, 32):
        for _ in range(3):
            measured.observe_round(
                rows=rows,
                longest=0,
                tokens=rows,
                draft_steps=0,
                draft_s=0.0,
                head_s=fixed_s + row_s * rows,
                link_s=link_s,
                tail_s=fixed_s + row_s * rows,
                bytes_up=1000 * rows,
            )
    return measured


def chosen(rows: int, measured: Costs, *, most: int = 8, present: int = 1) -> int:
    return num_lanes(rows, 0, measured, most=most, present=present)


def test_where_the_model_costs_next_to_nothing_one_lane_is_as_good_as_many() -> None:
    assert chosen(16, costs(fixed_s=0.001, row_s=0.00001, link_s=0.086)) == 1


def test_without_a_link_head_and_tail_work_at_the_same_time_on_two_lanes() -> None:
    assert chosen(16, costs(fixed_s=0.001, row_s=0.01, link_s=0.0)) == 2


def test_where_rows_cost_as_much_alone_lanes_hide_the_link_and_no_more() -> None:
    measured = costs(fixed_s=0.0, row_s=0.01, link_s=0.2)
    # a lane of 32 / n rows computes 0.32 / n s on either side: 1 + (link + tail) / head = 2 + 0.2 n / 0.32
    assert 4 <= chosen(32, measured, most=16) <= 8


def test_where_a_forward_costs_much_whatever_its_rows_few_lanes_are_used() -> None:
    assert chosen(32, costs(fixed_s=0.1, row_s=0.0005, link_s=0.086)) <= 3


def test_no_more_lanes_than_rows_or_than_the_link_has() -> None:
    measured = costs(fixed_s=0.0, row_s=0.01, link_s=1.0)
    assert chosen(3, measured) <= 3
    assert chosen(32, measured, most=4) == 4


def test_before_anything_was_measured_there_is_one_lane() -> None:
    assert chosen(16, Costs()) == 1


def test_a_number_of_lanes_that_is_hardly_better_is_not_taken() -> None:
    measured = costs(fixed_s=0.001, row_s=0.00001, link_s=0.086)
    assert chosen(16, measured, present=2) == 2


def test_a_fixed_number_stays() -> None:
    lanes = Lanes(3, fixed=True)
    lanes.adapt(16, 0, costs(fixed_s=0.1, row_s=0.0, link_s=0.0))
    assert (lanes.num, lanes.num_used(16), lanes.num_used(2), lanes.num_used(0)) == (3, 3, 2, 1)


@pytest.mark.parametrize(("rows", "lanes", "shares"), [(7, 3, [3, 3, 1]), (2, 4, [1, 1]), (8, 2, [4, 4]), (5, 1, [5])])
def test_rows_spread_evenly_over_the_lanes(rows: int, lanes: int, shares: list[int]) -> None:
    free, ready, taken = Lanes(lanes, fixed=True), list(range(rows)), []
    while (share := free.share(ready, rows)) is not None:
        taken.append(len(share[1]))
        ready = ready[len(share[1]) :]
    assert taken == shares
    assert not ready


def test_rows_beyond_what_a_frame_holds_take_the_next_lane_or_wait_at_the_front() -> None:
    lanes = Lanes(2, fixed=True)
    lanes.open(3)
    ready = list(range(8))
    assert lanes.share(ready, 8) == (0, [0, 1, 2])
    assert lanes.share(ready[3:], 8) == (1, [3, 4, 5])
    assert lanes.share(ready[6:], 8) is None
    assert lanes.num_used(8) == 2
    lanes.answered(0)
    assert lanes.share([6, 7, 0, 1, 2], 8) == (0, [6, 7, 0])


def test_there_are_lanes_for_all_rows_as_far_as_the_link_has_them() -> None:
    lanes = Lanes(4, fixed=False)
    for most_rows, num in ((16, 1), (8, 2), (5, 4), (1, 4)):
        lanes.open(most_rows)
        lanes.adapt(16, 0, Costs())
        assert lanes.num == num


@given(seed=st.integers(0, 2**32), most=st.integers(1, 6), most_rows=st.sampled_from([1, 3, 100]))
def test_whatever_comes_and_goes_no_row_is_in_two_lanes_and_none_waits_while_a_lane_is_free(
    seed: int, most: int, most_rows: int
) -> None:
    rng = random.Random(seed)
    lanes, ready, flying, overtaken = Lanes(most, fixed=True), [], {}, {}
    lanes.open(most_rows)
    for number in range(200):
        lanes.num = rng.randint(1, most)
        if rng.random() < 0.2:
            ready.append(number)
            overtaken[number] = 0
        if flying and rng.random() < 0.7:
            lane = rng.choice(list(flying))
            lanes.answered(lane)
            back = [row for row in flying.pop(lane) if rng.random() < 0.95]
            for row in back:
                overtaken[row] = 0
            ready += back
        rows = len(ready) + sum(map(len, flying.values()))
        while (share := lanes.share(ready, rows)) is not None:
            lane, taken = share
            assert lane not in flying
            assert taken == ready[: len(taken)]
            assert len(taken) <= min(-(-rows // lanes.num), most_rows)
            flying[lane], ready = taken, ready[len(taken) :]
        assert not ready or len(flying) >= lanes.num
        assert len({row for rows_of in flying.values() for row in rows_of}) == sum(map(len, flying.values()))
