"""Seeds of choices."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tasks.generation import GenerationRequest
from tasks.seeds import choice_seed

seeds = st.integers(-(2**63), 2**63 - 1)


def test_the_seeds_that_users_were_told_stay() -> None:
    # SplitMix64 from the state 1234567, as its authors' code has it
    assert [choice_seed(1234567, choice) for choice in range(4)] == [
        1234567,
        6457827717110365317,
        3203168211198807973,
        9817491932198370423 - 2**64,
    ]


@given(seeds, st.integers(0, 127))
def test_a_seed_is_one_of_64_bits(seed: int, choice: int) -> None:
    assert -(2**63) <= choice_seed(seed, choice) < 2**63


@given(seeds)
def test_no_two_choices_of_a_request_have_one_seed(seed: int) -> None:
    assert len({choice_seed(seed, choice) for choice in range(128)}) == 128


def test_neighbouring_seeds_share_no_choice() -> None:
    assert len({choice_seed(seed, choice) for seed in range(100) for choice in range(128)}) == 12_800


def test_a_choice_has_a_request_of_its_own() -> None:
    request = GenerationRequest("p", None, 7, n=3, min_tokens=2)
    assert request.of_choice(0) == GenerationRequest("p", None, 7, min_tokens=2)
    assert request.of_choice(2) == GenerationRequest("p", None, choice_seed(7, 2), min_tokens=2)
