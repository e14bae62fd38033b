"""The exact mode: a token's bits depend on nothing but the tokens before it, in half precision, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models import tiny_model
from workers.engine.loader import load_whole
from workers.engine.shard import WholeModel

DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2", window=9)


def model(directory: Path, dtype: str, *, exact: bool = True) -> WholeModel:
    return load_whole(directory, dtype=dtype, slots=5, max_length=64, max_query=32, exact=exact)


def logits(model: WholeModel, tokens: Tensor, slots: list[int], starts: list[int]) -> Tensor:
    hidden = model.forward(tokens, torch.tensor(slots), torch.tensor(starts))
    return model.logits(hidden.flatten(0, 1)).reshape(*tokens.shape, -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_slots_and_chunks_change_no_bit(directory: Path, dtype: str) -> None:
    exact = model(directory, dtype)
    tokens = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))

    together = logits(exact, tokens, [4, 0, 2], [0, 0, 0])
    for row, slot in ((0, 1), (1, 3), (2, 4)):
        chunks, begin = [], 0
        for length in (1, 7, 2, 14):
            chunks.append(logits(exact, tokens[row, None, begin : begin + length], [slot], [begin]))
            begin += length

        assert torch.equal(torch.cat(chunks, dim=1)[0], together[row])


def test_without_it_they_do(directory: Path) -> None:
    plain = model(directory, "bfloat16", exact=False)
    tokens = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))

    together = logits(plain, tokens, [4, 0, 2], [0, 0, 0])
    alone = torch.cat([logits(plain, tokens[:, i, None], [4, 0, 2], [i] * 3) for i in range(24)], dim=1)

    assert not torch.equal(together, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_computed_is_what_the_plain_mode_computes(directory: Path, dtype: str) -> None:
    tokens = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))

    results = [logits(model(directory, dtype, exact=exact), tokens, [4, 0, 2], [0, 0, 0]) for exact in (True, False)]

    error = float((results[0] - results[1]).norm() / results[1].norm())
    assert error < {"float32": 1e-5, "bfloat16": 0.03}[dtype]
