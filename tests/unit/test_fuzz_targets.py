"""A short campaign on everything that reads foreign bytes; `make fuzz` runs the long one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.campaign import MAX_INPUT_S, Report, TooLarge, fuzz, limited_time, run_one
from tests.fuzz.mutator import damage_bytes, damage_document, damage_packed
from tests.fuzz.strategies import STRATEGIES
from tests.fuzz.targets import SHARES, TARGETS, Target

#: damaged inputs of each target, and those that Hypothesis builds
NUM_DAMAGED, NUM_BUILT = 400, 60

NAMES = [target.name for target in TARGETS]


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_every_undamaged_input_is_taken(target: Target) -> None:
    if target.name != "stream keys":
        assert all(target.check(seed) for seed in target.seeds)


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_no_damaged_input_breaks_its_reader(target: Target) -> None:
    report = fuzz(target, NUM_DAMAGED, seed=7)
    assert report.findings == []
    assert report.inputs == NUM_DAMAGED
    assert 0 < report.taken < NUM_DAMAGED


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_nothing_that_hypothesis_builds_breaks_its_reader(target: Target) -> None:
    @settings(max_examples=NUM_BUILT, deadline=None, suppress_health_check=list(HealthCheck))
    @given(STRATEGIES[target.name])
    def attempt(data: bytes) -> None:
        target.check(data)

    attempt()


def test_the_shares_of_all_targets_make_a_thousand() -> None:
    assert sum(SHARES.values()) == 1000
    assert SHARES.keys() == set(NAMES)


def test_the_same_seed_gives_the_same_inputs() -> None:
    seen: list[list[bytes]] = []
    for _ in range(2):
        inputs = TARGETS[2].inputs(Random("1/lines/0"))
        seen.append([next(inputs) for _ in range(50)])
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 40


@pytest.mark.parametrize("damage", [damage_bytes, damage_packed, damage_document])
@given(st.integers())
@settings(max_examples=50, deadline=None)
def test_damage_never_fails_and_mostly_changes_something(damage: object, seed: int) -> None:
    assert callable(damage)
    data = b'{"prompt": "x"}' if damage is damage_document else b"\x92\xa1x\x01"
    rng = Random(seed)
    assert sum(damage(rng, data) != data for _ in range(10)) >= 5


def broken(data: bytes) -> bool:
    raise KeyError(data)


def slow(data: bytes) -> bool:
    while True:
        pass


def greedy(data: bytes) -> bool:
    return bool(bytearray(60 << 20))


@pytest.mark.parametrize(("check", "name"), [(broken, "KeyError"), (slow, "Hung"), (greedy, "TooLarge")])
def test_a_reader_that_fails_hangs_or_takes_too_much_is_found(
    monkeypatch: pytest.MonkeyPatch, check: object, name: str
) -> None:
    monkeypatch.setattr("tests.fuzz.campaign.MAX_INPUT_S", 0.2)
    monkeypatch.setattr("tests.fuzz.campaign.TRACED_EVERY", 1)
    assert callable(check)
    target, report = Target("t", (b"x",), damage_bytes, check), Report("t")
    with limited_time():
        run_one(target, b"data", report)
    (finding,) = report.findings
    assert finding.error.startswith(f"{name}: ")
    assert finding.data == b"data"
    assert MAX_INPUT_S > 1
    assert issubclass(TooLarge, AssertionError)
