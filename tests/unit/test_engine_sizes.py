"""What a half takes is known from the config, to the byte; splits and slots follow from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, PreTrainedConfig

from relay.room import Room, least
from tests.models import FAMILY_SETTINGS, tiny_model
from workers.engine.loader import load_config, load_head, load_tail, load_whole
from workers.engine.pace import measure_pace
from workers.engine.quantization import Quantization
from workers.engine.sizes import ModelSizes, sizes_of
from workers.engine.slots import MAX_SLOTS, slots_that_fit
from workers.engine.split import check_head_fits, check_tail_fits, choose_split, head_load, tail_load
from workers.errors import OutOfMemory, SplitInvalid

CAPACITY: dict[str, Any] = {"slots": 3, "max_length": 32, "max_query": 8}


def qwen14b() -> PreTrainedConfig:
    """Qwen2.5-14B."""
    return AutoConfig.for_model(
        "qwen2",
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
@pytest.mark.parametrize("family", sorted(FAMILY_SETTINGS))
def test_the_sizes_of_a_config_are_those_of_the_loaded_halves(
    tmp_path: Path, family: str, quantization: Quantization
) -> None:
    directory = tiny_model(tmp_path, family)
    sizes = sizes_of(load_config(directory), "bfloat16", quantization)
    options: dict[str, Any] = {**CAPACITY, "dtype": "bfloat16", "quantization": quantization}
    head, tail = load_head(directory, 3, **options), load_tail(directory, 3, **options)
    assert sizes.head(3) == head.num_weight_bytes
    assert sizes.tail(3) == tail.num_weight_bytes
    for half, num_layers in ((head, 3), (tail, 1)):
        cache = half._cache.keys.nbytes + half._cache.values.nbytes
        assert sizes.slot(num_layers, 32 + 8) * (3 + 1) == cache


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_models_tied_embeddings_count_once(tmp_path: Path, tied: bool) -> None:
    directory = tiny_model(tmp_path, tied=tied)
    sizes = sizes_of(load_config(directory), "float32", "none")
    assert sizes.whole(tied=tied) == load_whole(directory, **CAPACITY).num_weight_bytes


def room(free_gb: float, *, slots: int = 16, layer_ms: float = 1.0, lm_head_ms: float = 1.0) -> Room:
    """A machine whose slots are those of Qwen2.5-14B in half precision with 1024 tokens."""
    return Room(int(free_gb * 1e9), 1536 * 4096, 0, slots, layer_ms / 1e3, lm_head_ms / 1e3)


@pytest.mark.parametrize("lm_head_ms", [0.5, 1.0, 5.0])
def test_each_half_of_a_14b_model_in_nf4_takes_less_than_5_5_gb_with_the_automatic_split(lm_head_ms: float) -> None:
    """At 1 ms a layer an LM head takes 0.5 to 5 ms, from a machine that is slow at unpacking to one that is not."""
    sizes = sizes_of(qwen14b(), "float16", "nf4")
    split = choose_split(sizes, room(14.0), room(14.0, lm_head_ms=lm_head_ms))
    assert sizes.head(split) <= 5.5e9
    assert sizes.tail(split) <= 5.5e9


def test_a_14b_model_in_half_precision_fits_two_machines_of_16_gb_nowhere_and_the_numbers_are_said() -> None:
    sizes = sizes_of(qwen14b(), "float16", "none")
    with pytest.raises(SplitInvalid) as raised:
        choose_split(sizes, room(14.0), room(14.0))
    text = str(raised.value)
    for number in ("48 layers", "29.54 GB", "14.00 GB", "embeddings and 18 layers", "18 layers and the LM head"):
        assert number in text
    assert "--quantization nf4" in text


SMALL = ModelSizes(24, 100, 300, 1, 300, 2, 0, 0)


def small_room(free_bytes: int, *, layer_s: float = 1.0, lm_head_s: float = 0.0, slots: int = 1) -> Room:
    return Room(free_bytes, 0, 0, slots, layer_s, lm_head_s)


def test_equal_machines_share_the_layers_and_the_lm_head_counts_for_some() -> None:
    plenty = small_room(10**6)
    assert choose_split(SMALL, plenty, plenty) == 12
    assert choose_split(SMALL, plenty, replace(plenty, lm_head_s=4.0)) == 14


def test_the_faster_machine_takes_more_layers() -> None:
    assert choose_split(SMALL, small_room(10**6, layer_s=2.0), small_room(10**6)) == 8
    assert choose_split(SMALL, small_room(10**6), small_room(10**6, layer_s=3.0)) == 18


def test_memory_limits_what_pace_asks_for() -> None:
    tight = small_room(300 + 5 * 100)
    assert choose_split(SMALL, tight, small_room(10**6, layer_s=9.0)) == 5
    assert choose_split(SMALL, small_room(10**6, layer_s=9.0), small_room(301 + 5 * 100)) == 19


def test_the_cache_of_all_slots_counts() -> None:
    hungry = Room(300 + 5 * 100 + 3 * 7, 0, 7, 2, 1.0, 0.0)
    assert choose_split(SMALL, hungry, small_room(10**6, layer_s=9.0)) == 5
    assert choose_split(SMALL, replace(hungry, slots=3), small_room(10**6, layer_s=9.0)) == 4


memories = st.integers(0, 4000)
paces = st.floats(0.0, 10.0, allow_subnormal=False)


@settings(max_examples=200)
@given(first=memories, second=memories, first_s=paces, second_s=paces, lm_head_s=paces, slots=st.integers(1, 20))
def test_no_split_that_fits_is_more_than_a_twentieth_quicker(
    first: int, second: int, first_s: float, second_s: float, lm_head_s: float, slots: int
) -> None:
    head, tail = Room(first, 3, 5, slots, first_s, 0.0), Room(second, 4, 6, slots, second_s, lm_head_s)

    def fits(split: int) -> bool:
        enough = head_load(SMALL, split, head).num_bytes <= first
        return enough and tail_load(SMALL, split, tail).num_bytes <= second

    def seconds(split: int) -> float:
        return max(head_load(SMALL, split, head).seconds, tail_load(SMALL, split, tail).seconds)

    fitting = [split for split in range(1, 24) if fits(split)]
    if not fitting:
        with pytest.raises(SplitInvalid, match="fit these machines nowhere"):
            choose_split(SMALL, head, tail)
        return
    chosen = choose_split(SMALL, head, tail)
    assert chosen in fitting
    assert seconds(chosen) <= 1.05 * min(map(seconds, fitting))


@pytest.mark.parametrize("check", [check_head_fits, check_tail_fits])
def test_a_split_chosen_elsewhere_that_does_not_fit_is_refused_with_what_helps(
    check: Callable[[ModelSizes, int, Room], None],
) -> None:
    check(SMALL, 12, small_room(1501))
    with pytest.raises(SplitInvalid, match=r"need 0\.00 GB, and 0\.00 GB are free; give another --split"):
        check(SMALL, 12, small_room(1400))


def test_the_least_of_several_rooms_is_what_each_of_them_has() -> None:
    rooms = [small_room(100, layer_s=1.0), small_room(90, layer_s=0.5, slots=4), small_room(95, lm_head_s=2.0)]
    assert least(rooms) == Room(90, 0, 0, 4, 1.0, 2.0)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_a_room_that_no_machine_has_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="layer_s: expected a number"):
        Room(1, 1, 1, 1, value, 0.0)


def test_slots_are_what_free_memory_holds_beside_the_scratch_slot() -> None:
    assert slots_that_fit(1000, 100) == 9
    assert slots_that_fit(200, 100) == 1
    assert slots_that_fit(10**9, 100) == MAX_SLOTS
    assert slots_that_fit(10**9, 100, most=7) == 7


@pytest.mark.parametrize("free", [199, 0, -5000])
def test_without_room_for_one_slot_the_error_says_what_is_needed(free: int) -> None:
    with pytest.raises(OutOfMemory, match=r"2 x 0\.0 MB are needed beside the weights .* --max-length"):
        slots_that_fit(free, 100)


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_a_layer_and_an_lm_head_are_timed_with_made_up_weights(
    tmp_path: Path, family: str, quantization: Quantization
) -> None:
    config = load_config(tiny_model(tmp_path, family))
    pace = measure_pace(config, "float32", "cpu", quantization)
    assert 0 < pace.layer_s < 1
    assert 0 < pace.lm_head_s < 1
