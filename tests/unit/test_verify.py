"""Verification accepts the longest prefix that the target would have chosen itself."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.verify import verify


def accepted(choices: list[list[int]], drafts: list[list[int]], lengths: list[int]) -> list[int]:
    rows = len(choices)
    as_tensor = torch.tensor(drafts, dtype=torch.int64).reshape(rows, -1)
    return verify(torch.tensor(choices), as_tensor, torch.tensor(lengths)).tolist()


def test_the_first_difference_ends_the_accepted_prefix() -> None:
    assert accepted([[1, 2, 3, 4]] * 3, [[1, 2, 3], [1, 9, 3], [9, 2, 3]], [3, 3, 3]) == [3, 1, 0]


def test_padding_behind_a_draft_is_never_accepted() -> None:
    assert accepted([[1, 0, 0]] * 3, [[1, 0], [1, 0], [0, 0]], [2, 1, 0]) == [2, 1, 0]


def test_without_a_draft_nothing_is_accepted() -> None:
    assert accepted([[5], [6]], [[], []], [0, 0]) == [0, 0]


@given(st.data())
def test_the_batch_agrees_with_one_row_at_a_time(data: st.DataObject) -> None:
    width, rows = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 6))
    token = st.integers(0, 2)
    choices = [data.draw(st.lists(token, min_size=width + 1, max_size=width + 1)) for _ in range(rows)]
    drafts = [data.draw(st.lists(token, min_size=width, max_size=width)) for _ in range(rows)]
    lengths = [data.draw(st.integers(0, width)) for _ in range(rows)]

    def one(choice: list[int], draft: list[int], length: int) -> int:
        return next((i for i in range(length) if draft[i] != choice[i]), length)

    expected = [one(*row) for row in zip(choices, drafts, lengths, strict=True)]
    assert accepted(choices, drafts, lengths) == expected
