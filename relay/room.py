"""What one machine has for its half of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

#: bytes and seconds stay far below
_TOO_MUCH = 1e18


@dataclass(frozen=True, slots=True)
class Room:
    """A machine's memory and pace, as a split of a model's layers has to know them."""

    #: bytes for weights and cache; what forwards need beside them is taken off already
    free_bytes: int
    #: bytes that a slot of one layer's cache takes, and what every slot takes besides (a drafter's cache)
    slot_layer_bytes: int
    slot_bytes: int
    #: slots that have to fit
    slots: int
    #: seconds of a round in one decoder layer, and in the LM head
    layer_s: float
    lm_head_s: float

    def __post_init__(self) -> None:
        """ValueError for what no machine has: another machine may have told it."""
        values = asdict(self)
        for name, value in values.items():
            if not 0 <= value < _TOO_MUCH:
                raise ValueError(f"{name}: expected a number from 0 to {_TOO_MUCH:g}")


def least(rooms: Sequence[Room]) -> Room:
    """The room that every one of these machines has."""
    return Room(
        free_bytes=min(room.free_bytes for room in rooms),
        slot_layer_bytes=max(room.slot_layer_bytes for room in rooms),
        slot_bytes=max(room.slot_bytes for room in rooms),
        slots=max(room.slots for room in rooms),
        layer_s=max(room.layer_s for room in rooms),
        lm_head_s=max(room.lm_head_s for room in rooms),
    )
