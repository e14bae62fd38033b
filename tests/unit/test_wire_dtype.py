"""Hidden states on the wire: what narrower dtypes keep, and that a token's bytes are its own affair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.messages import DTYPE_BYTES, Hello, Tensor, token_bytes
from tests.models import tiny_model
from tests.relay_messages import PROFILE, tail_info
from workers.engine.source import Part
from workers.engine.tensors import LEVELS, from_wire, quantise, to_wire
from workers.head.session import HeadOffer
from workers.served import ServedModel
from workers.settings import HeadSettings, TailSettings
from workers.tail.worker import refuse

HIDDEN = 24
CPU = torch.device("cpu")

#: magnitudes from zero over subnormal numbers to nearly the largest float32
magnitudes = st.sampled_from([0.0, 1e-44, 1e-38, 1e-6, 1.0, 3000.0, 1e30, 3e38])


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scales = torch.tensor(draw(st.lists(magnitudes, min_size=1, max_size=6)))
    return (2 * torch.rand(len(scales), HIDDEN, generator=generator) - 1) * scales[:, None]


def there_and_back(values: torch.Tensor, wire_dtype: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return from_wire(to_wire(values, wire_dtype), dtype=dtype, device=CPU)


def bytes_of_row(tensor: Tensor, row: int) -> tuple[bytes, bytes]:
    width, scale = len(tensor.data) // tensor.shape[0], len(tensor.scales) // tensor.shape[0]
    return bytes(tensor.data[row * width :][:width]), bytes(tensor.scales[row * scale :][:scale])


@settings(deadline=None)
@given(matrices())
def test_int8_errs_by_half_a_step_of_the_row_at_most(values: torch.Tensor) -> None:
    levels, steps = quantise(values)
    assert levels.abs().max() <= LEVELS
    largest = values.abs().amax(dim=-1).double()
    # half a step, and what float32 rounds away; the very smallest numbers have no 127th part
    allowed = largest / LEVELS / 2 * (1 + 1e-5) + 2e-43
    errors = (there_and_back(values, "int8").double() - values.double()).abs().amax(dim=-1)
    assert (errors <= allowed).all(), (errors, allowed)
    assert torch.equal(steps, values.abs().amax(dim=-1) / LEVELS)


@settings(deadline=None)
@given(matrices(), st.sampled_from(sorted(DTYPE_BYTES)), st.randoms())
def test_a_tokens_bytes_do_not_depend_on_the_tokens_beside_it(values: torch.Tensor, dtype: str, random: object) -> None:
    together = to_wire(values, dtype)
    for row in range(len(values)):
        assert bytes_of_row(to_wire(values[row : row + 1], dtype), 0) == bytes_of_row(together, row)
    order = list(range(len(values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = to_wire(values[order], dtype)
    assert [bytes_of_row(shuffled, n) for n in range(len(order))] == [bytes_of_row(together, row) for row in order]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_is_not_finite_behind_the_wire_and_harms_no_other(bad: float) -> None:
    values = torch.randn(3, HIDDEN)
    spoiled = values.clone()
    spoiled[1, 5] = bad
    back = there_and_back(spoiled, "int8")
    assert back[1].isnan().all()
    assert torch.equal(back[[0, 2]], there_and_back(values, "int8")[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_compute_dtype_itself_loses_nothing(dtype: torch.dtype) -> None:
    values = torch.randn(4, HIDDEN).to(dtype)
    assert torch.equal(there_and_back(values, str(dtype).removeprefix("torch."), dtype), values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_narrower_float_rounds(dtype: str) -> None:
    values = torch.randn(4, HIDDEN)
    assert torch.equal(there_and_back(values, dtype), values.to(getattr(torch, dtype)).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int8_comes_back_in_the_compute_dtype(dtype: torch.dtype) -> None:
    values = torch.randn(4, HIDDEN).to(dtype)
    values[0, 0] = torch.finfo(dtype).max
    back = there_and_back(values, "int8", dtype)
    assert back.dtype == dtype
    assert back.isfinite().all()


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_a_token_takes_as_many_bytes_as_the_head_reckons_with(dtype: str) -> None:
    tensor = to_wire(torch.randn(3, HIDDEN), dtype)
    assert len(tensor.data) + len(tensor.scales) == 3 * token_bytes(HIDDEN, dtype)


def test_head_and_tail_with_different_wire_dtypes_refuse_each_other_and_name_both() -> None:
    narrow = replace(PROFILE, wire_dtype="int8")
    offer = HeadOffer("gpu-a", narrow, split=2, slots=8, lanes=1, max_query=64)
    tail = tail_info()
    assert "wire_dtype: float32 ≠ int8" in str(offer.misfit(tail))
    refusal = refuse(tail, Hello("gpu-a", 1, 1, narrow, split=2, slots=8, max_query=64))
    assert refusal is not None
    assert refusal.message.endswith("and head gpu-a differ: wire_dtype: float32 ≠ int8")


@pytest.mark.parametrize(
    ("dtype", "chosen", "expected"),
    [("float32", None, "float32"), ("bfloat16", None, "bfloat16"), ("float32", "int8", "int8")],
)
def test_the_wire_dtype_is_part_of_the_profile_of_both_halves(
    tmp_path: Path, dtype: str, chosen: str | None, expected: str
) -> None:
    both = {"model": str(tiny_model(tmp_path)), "dtype": dtype, "wire_dtype": chosen, "max_length": 128}
    head = ServedModel.resolve(HeadSettings(**both), Part.HEAD)  # type: ignore[arg-type]
    tail = ServedModel.resolve(TailSettings(**both), Part.TAIL)  # type: ignore[arg-type]
    assert head.profile.wire_dtype == expected
    assert head.profile == tail.profile
