"""A head and a tail that are told "auto" settle on split and slots before they load, and then fit each other."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from relay.memory import MemoryHub, MemoryRelay
from relay.room import Room
from relay.transport import SplitClaim
from tests.models import tiny_model
from workers import room
from workers.engine.loader import load_config
from workers.engine.pace import Pace
from workers.engine.sizes import sizes_of
from workers.engine.source import Part
from workers.errors import OutOfMemory
from workers.head.room import head_machine
from workers.head.session import HeadOffer, TailSearch
from workers.head.worker import settle
from workers.room import Machine
from workers.served import ServedModel
from workers.settings import HeadSettings, TailSettings
from workers.tail.worker import TailWorker
from workers.tail.worker import settle as settle_tail

MIB = 1 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("auto"), layers=8)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plenty of memory, and layers that take as long on either side."""
    monkeypatch.setattr(room, "free_bytes", lambda device: 1024 * MIB)
    monkeypatch.setattr(room, "measure_pace", lambda *_: Pace(0.001, 0.002))


def head_settings(directory: Path, **given: Any) -> HeadSettings:
    return HeadSettings(model=str(directory), max_length=128, **given)


def tail_settings(directory: Path, **given: Any) -> TailSettings:
    return TailSettings(model=str(directory), max_length=128, tail_name="t", **given)


def settle_head(
    relay: MemoryRelay, settings: HeadSettings, stop: threading.Event
) -> tuple[HeadSettings, SplitClaim] | None:
    return settle(relay, settings, ServedModel.resolve(settings, Part.DESCRIPTION), stop)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_both_halves_come_out_of_auto_cut_alike_and_work_together(
    directory: Path, quantization: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hub, stop = MemoryHub(), threading.Event()
    auto: dict[str, Any] = {"split": "auto", "slots": "auto", "quantization": quantization}
    with ThreadPoolExecutor(2) as pool:
        tail_side = pool.submit(settle_tail, MemoryRelay(hub), tail_settings(directory, **auto), stop)
        head_side = pool.submit(settle_head, MemoryRelay(hub), head_settings(directory, **auto), stop)
        tail, settled = tail_side.result(60), head_side.result(60)
    assert tail is not None
    assert settled is not None
    settings, claim = settled
    assert settings.split == tail.split == claim.split == 5  # of 8: the LM head is worth two layers
    assert settings.num_slots == 256
    assert 1 <= tail.slots <= 256

    few = replace(tail, slots=3)
    shard = loaded_tail(directory, few.split, quantization)
    serving = threading.Thread(target=TailWorker(MemoryRelay(hub), few, shard).serve, args=(stop,))
    serving.start()
    offer = HeadOffer("head", tail.profile, claim.split, settings.num_slots, 1, 64, takes_fewer=True)
    session = TailSearch(MemoryRelay(hub), offer).wait(threading.Event(), 20)
    assert session is not None
    assert session.slots == 3
    assert f"tail {few.tail} has 3 slots: using so many of our 256" in caplog.text
    session.close()
    stop.set()
    serving.join(10)


def loaded_tail(directory: Path, split: int | None, quantization: str) -> Any:
    from workers.engine.loader import load_tail

    assert split is not None
    return load_tail(directory, split, slots=3, max_length=128, max_query=64, quantization=quantization)  # type: ignore[arg-type]


def test_a_head_with_a_number_of_slots_still_refuses_a_tail_with_fewer(directory: Path) -> None:
    tail = settle_tail(MemoryRelay(MemoryHub()), tail_settings(directory, slots=8), threading.Event())
    assert tail is not None
    assert tail.split == 4
    offer = HeadOffer("head", tail.profile, 4, 16, 1, 64)
    assert offer.misfit(tail) == (f"tail {tail.tail} and head head differ: slots: 8 < 16 (give both the same --slots)")
    assert replace(offer, takes_fewer=True).misfit(tail) is None


def test_numbers_that_are_given_are_taken_as_they_are(directory: Path) -> None:
    hub = MemoryHub()
    settled = settle_head(MemoryRelay(hub), head_settings(directory, split=3, slots=5), threading.Event())
    assert settled is not None
    assert (settled[0].split, settled[0].num_slots) == (3, 5)
    tail = settle_tail(MemoryRelay(hub), tail_settings(directory, split="auto"), threading.Event())
    assert tail is not None
    assert (tail.split, tail.slots) == (3, 64)


def test_a_half_that_does_not_fit_is_refused_before_it_is_loaded_with_the_numbers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: 1 * MIB)
    relay, stop = MemoryRelay(MemoryHub()), threading.Event()
    with pytest.raises(OutOfMemory, match=r"are needed on cpu and 0\.00 GB are free: .* for 16 slots; --slots"):
        settle_head(relay, head_settings(directory), stop)
    with pytest.raises(OutOfMemory, match=r"of cache for 64 slots; --slots auto, --quantization nf4"):
        settle_tail(relay, tail_settings(directory), stop)
    with pytest.raises(OutOfMemory, match="no room for a single slot"):
        settle_tail(relay, tail_settings(directory, slots="auto"), stop)


def test_where_nobody_says_what_is_free_auto_asks_for_numbers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: None)
    relay, stop = MemoryRelay(MemoryHub()), threading.Event()
    assert settle_head(relay, head_settings(directory), stop) is not None
    with pytest.raises(OutOfMemory, match="nobody says how much memory is free on cpu: give --split and --slots"):
        settle_head(relay, head_settings(directory, slots="auto"), stop)


def test_a_drafters_weights_and_cache_are_counted(directory: Path) -> None:
    plain = head_machine(head_settings(directory), directory)
    drafting = head_machine(head_settings(directory, drafter="model", drafter_model=str(directory)), directory)
    sizes = sizes_of(load_config(directory), "float32", "none")
    assert drafting.beside.weight_bytes == sizes.whole(tied=False)
    assert drafting.needs(4)[1] - plain.needs(4)[1] == sizes.slot(8, 128 + 128)
    less = plain.room(16).free_bytes - drafting.room(16).free_bytes
    assert less == drafting.beside.weight_bytes


def test_the_tail_keeps_room_for_the_logits_of_a_large_forward(directory: Path) -> None:
    settings = tail_settings(directory)
    tail = Machine.described(settings, directory, Part.TAIL, max_query=512)
    head = Machine.described(settings, directory, Part.HEAD, max_query=512)
    kept = head.room(4).free_bytes - tail.room(4).free_bytes
    assert kept == 1024 * 4 * 4 * load_config(directory).vocab_size
    assert isinstance(tail.room(4), Room)


def test_free_memory_of_the_host_is_known_on_linux() -> None:
    from workers.memory import free_bytes

    if not Path("/proc/meminfo").is_file():
        pytest.skip("reads Linux' /proc")
    free = free_bytes(torch.device("cpu"))
    assert free is not None
    assert 16 * MIB < free < 1 << 50
