"""What the dashboard shows of an ended job."""

from __future__ import annotations

from dataclasses import replace

from tasks.generation import Choice, FinishReason
from tests.bookkeeping import outcome
from workers.head.front_executor import summary


def test_a_summary_counts_the_tokens_of_all_choices() -> None:
    alone = outcome("j")
    several = replace(alone, choices=(Choice("b", (7, 8), FinishReason.LENGTH), Choice("", (), FinishReason.STOP)))
    assert summary(alone) == {"tps": 5.0, "tokens": 3, "finish": "stop"}
    assert summary(replace(alone, metrics=None)) == {"tokens": 3, "finish": "stop"}
    assert summary(several) == {"tps": 5.0, "tokens": 5, "finish": "stop"}
