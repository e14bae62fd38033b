"""The figures of a job whose choices ran beside each other, and one after another."""

from __future__ import annotations

import pytest

from workers.head.ledger import Ledger


def ledger(started: float, first: float | None, last: float | None, num_tokens: int, **figures: float) -> Ledger:
    return Ledger(
        wire_dtype="float32",
        started_at=1000 + started,
        started=started,
        first_commit=first,
        last_commit=last,
        num_first=1 if first is not None else 0,
        num_tokens=num_tokens,
        **figures,  # type: ignore[arg-type]
    )


def test_clocks_go_from_the_first_beginning_to_the_last_commit_and_the_rest_adds_up() -> None:
    first = ledger(0.0, 2.0, 6.0, 9, rounds=4, round_tokens=8, drafted=8, accepted=4, bytes_up=10, cached_tokens=3)
    second = ledger(0.1, 1.5, 5.0, 5, rounds=4, round_tokens=4, drafted=4, accepted=1, bytes_up=20, cached_tokens=30)
    third = ledger(5.5, 7.0, 11.5, 7, rounds=2, round_tokens=6, drafted=8, accepted=4, bytes_up=30, tail_s=0.5)

    metrics = Ledger.together([first, second, third]).metrics()

    assert (metrics.started_at, metrics.finished_at, metrics.ttft_s) == (1000.0, 1011.5, 1.5)
    assert metrics.decode_tps == pytest.approx((9 + 5 + 7 - 1) / (11.5 - 1.5))
    assert (metrics.rounds, metrics.tokens_per_round, metrics.drafted, metrics.accepted) == (10, 1.8, 20, 9)
    assert (metrics.wire_bytes_up, metrics.tail_s, metrics.cached_tokens) == (60, 0.5, 3)
    assert metrics.wire_dtype == "float32"


def test_a_choice_without_a_commit_adds_its_work_only() -> None:
    together = Ledger.together([ledger(0.0, 1.0, 3.0, 5), ledger(0.5, None, None, 0, bytes_up=7)])
    assert (together.decode_tps(), together.bytes_up, together.last_commit) == (2.0, 7, 3.0)


def test_before_any_commit_there_is_no_rate() -> None:
    metrics = Ledger.together([ledger(0.0, None, None, 0)] * 2).metrics()
    assert (metrics.ttft_s, metrics.decode_tps, metrics.tokens_per_round) == (None, None, None)


def test_one_choice_has_its_own_figures() -> None:
    alone = ledger(0.0, 1.0, 3.0, 5, rounds=2, round_tokens=4, drafted=4, accepted=2, cached_tokens=5, head_s=0.25)
    assert Ledger.together([alone]) == alone


def test_rounds_are_counted_by_what_was_drafted_and_accepted_of_it_and_add_up_over_choices() -> None:
    first, second = ledger(0.0, 1.0, 3.0, 5), ledger(0.1, 1.0, 3.0, 5)
    first.count_round(drafted=3, accepted=1, kept=2)
    first.count_round(drafted=0, accepted=0, kept=1)
    # The text ends after two of the tokens: neither the third nor the verifier's own count.
    first.count_round(drafted=3, accepted=3, kept=2)
    second.count_round(drafted=2, accepted=0, kept=1)

    metrics = Ledger.together([first, second]).metrics()

    assert first.metrics().rounds_by_draft == ((1,), (0, 0), (0, 0, 1), (0, 1, 0, 0))
    assert metrics.rounds_by_draft == ((1,), (0, 0), (1, 0, 1), (0, 1, 0, 0))
    assert sum(map(sum, metrics.rounds_by_draft)) == metrics.rounds
    drafted = sum(length * sum(counts) for length, counts in enumerate(metrics.rounds_by_draft))
    accepted = sum(number * count for counts in metrics.rounds_by_draft for number, count in enumerate(counts))
    assert (drafted, accepted) == (metrics.drafted, metrics.accepted)
