"""What this machine has for its half of a model: memory, pace, slots."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from relay.room import Room
from workers.engine.loader import load_config
from workers.engine.pace import measure_pace
from workers.engine.sizes import ModelSizes, sizes_of
from workers.engine.slots import slots_that_fit
from workers.engine.source import Part
from workers.errors import OutOfMemory
from workers.memory import free_bytes
from workers.settings import Quantization, Slots, WorkerSettings

log = logging.getLogger(__name__)

#: positions of the largest usual forward: what is kept free for activations; more than that and a round is made of
#: fewer jobs
FORWARD_POSITIONS = 1024
#: bytes kept free besides, by device type: workspaces of libraries, captured graphs, fragments
RESERVE_BYTES = {"cuda": 768 << 20, "cpu": 256 << 20}
#: slots that a split must leave room for where their number is chosen after it
SLOTS_AT_LEAST = 4


@dataclass(frozen=True, slots=True)
class Beside:
    """What a machine holds beside its half."""

    weight_bytes: int = 0
    slot_bytes: int = 0


NOTHING_BESIDE = Beside()


@dataclass(frozen=True, slots=True)
class Machine:
    """A device and the half of a model that it shall hold."""

    part: Part
    config: PreTrainedConfig
    sizes: ModelSizes
    dtype: str
    quantization: Quantization
    device: torch.device
    #: positions of a slot's cache, those for padding included
    positions: int
    beside: Beside

    @classmethod
    def described(
        cls, settings: WorkerSettings, directory: Path, part: Part, *, max_query: int, beside: Beside = NOTHING_BESIDE
    ) -> Machine:
        """As the settings and the model's directory, which needs no weights, say."""
        config = load_config(directory)
        return cls(
            part=part,
            config=config,
            sizes=sizes_of(config, settings.dtype, settings.quantization),
            dtype=settings.dtype,
            quantization=settings.quantization,
            device=torch.device(settings.device),
            positions=settings.max_length + max_query,
            beside=beside,
        )

    def room(self, slots: Slots) -> Room:
        """Memory and pace for a split; `slots` "auto" asks for room for a few. Takes a moment. Raises OutOfMemory."""
        free = self._free_bytes()
        pace = measure_pace(self.config, self.dtype, self.device, self.quantization)
        log.info(
            "%.2f GB for weights and cache on %s, %.3f ms a layer, %.3f ms the LM head",
            *(free / 1e9, self.device, pace.layer_s * 1e3, pace.lm_head_s * 1e3),
        )
        return Room(
            free_bytes=max(0, free),
            slot_layer_bytes=self.sizes.slot(1, self.positions),
            slot_bytes=self.beside.slot_bytes,
            slots=SLOTS_AT_LEAST if slots == "auto" else slots,
            layer_s=pace.layer_s,
            lm_head_s=pace.lm_head_s,
        )

    def num_slots(self, slots: Slots, split: int) -> int:
        """The number of slots with this split. Raises OutOfMemory, with the numbers, where "auto" finds no room."""
        if slots != "auto":
            return slots
        weights, slot_bytes = self.needs(split)
        chosen = slots_that_fit(self._free_bytes() - weights, slot_bytes)
        log.info("%d slots of %.1f MB fit beside %.2f GB of weights", chosen, slot_bytes / 1e6, weights / 1e9)
        return chosen

    def needs(self, split: int) -> tuple[int, int]:
        """Bytes of the weights of the half, or of both, and of one slot; a drafter's are not among the weights."""
        if self.part is Part.HEAD:
            weights, num_layers = self.sizes.head(split), split
        elif self.part is Part.TAIL:
            weights, num_layers = self.sizes.tail(split), self.sizes.num_layers - split
        else:
            weights, num_layers = self.sizes.whole(tied=self.config.tie_word_embeddings), self.sizes.num_layers
        return weights, self.sizes.slot(num_layers, self.positions) + self.beside.slot_bytes

    def check(self, split: int, slots: int) -> None:
        """OutOfMemory, with the numbers, if half, cache and drafter are more than what is free now."""
        free = free_bytes(self.device)
        weights, slot_bytes = self.needs(split)
        needed = weights + self.beside.weight_bytes + (slots + 1) * slot_bytes
        if free is not None and needed > free:
            drafter = f"{_gb(self.beside.weight_bytes)} of the drafter, " if self.beside.weight_bytes else ""
            raise OutOfMemory(
                f"{_gb(needed)} are needed on {self.device} and {_gb(free)} are free: {_gb(weights)} of weights, "
                f"{drafter}{_gb((slots + 1) * slot_bytes)} of cache for {slots} slots; "
                "--slots auto, --quantization nf4, a smaller --max-length or --split auto needs less"
            )

    def _free_bytes(self) -> int:
        """What weights and cache may take: activations, reserve and drafter are taken off."""
        free = free_bytes(self.device)
        if free is None:
            raise OutOfMemory(f"nobody says how much memory is free on {self.device}: give --split and --slots")
        return free - self._margin_bytes() - self.beside.weight_bytes

    def _margin_bytes(self) -> int:
        per_position = self.sizes.layer_activations + (0 if self.part is Part.HEAD else self.sizes.logit_activations)
        return FORWARD_POSITIONS * per_position + RESERVE_BYTES.get(self.device.type, 0)


def checked_slots(machine: Machine, slots: Slots, split: int) -> int:
    """The number of slots with this split; OutOfMemory, with the numbers, if they do not fit beside the half."""
    number = machine.num_slots(slots, split)
    machine.check(split, number)
    return number


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
