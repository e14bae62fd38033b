"""Where to cut a model so that the two machines it runs on finish their halves soonest. No I/O."""

from __future__ import annotations

from typing import NamedTuple

from relay.room import Room
from workers.engine.sizes import ModelSizes
from workers.errors import SplitInvalid

#: of the splits that are slower than the best by less than this part, the one with the smaller larger half is taken:
#: memory is slots
WORTH_THE_MEMORY = 0.05


class Load(NamedTuple):
    """What a split asks of one machine."""

    #: bytes of weights and cache
    num_bytes: int
    #: seconds of a round
    seconds: float


def choose_split(sizes: ModelSizes, head: Room, tail: Room) -> int:
    """The first layer of the tail's half.

    Head and tail work on different rounds at the same time, so the slower half sets the pace: the longer of the two
    halves' times is made as short as both memories allow, the embeddings counted for the head's, norm and LM head for
    the tail's. Raises SplitInvalid, with the numbers, if the model fits the two machines nowhere.
    """
    splits = range(1, sizes.num_layers)
    loads = {split: (head_load(sizes, split, head), tail_load(sizes, split, tail)) for split in splits}
    fitting = {
        split: (first, second)
        for split, (first, second) in loads.items()
        if first.num_bytes <= head.free_bytes and second.num_bytes <= tail.free_bytes
    }
    if not fitting:
        raise SplitInvalid(_nowhere(sizes, head, tail))
    shortest = min(max(first.seconds, second.seconds) for first, second in fitting.values())
    quick = [
        split
        for split, (first, second) in fitting.items()
        if max(first.seconds, second.seconds) <= shortest * (1 + WORTH_THE_MEMORY)
    ]
    return min(quick, key=lambda split: max(load.num_bytes for load in fitting[split]))


def head_load(sizes: ModelSizes, split: int, room: Room) -> Load:
    """Embeddings and layers [0, split) on a machine."""
    return Load(sizes.head(split) + _cache(split, room), split * room.layer_s)


def tail_load(sizes: ModelSizes, split: int, room: Room) -> Load:
    """Layers [split, L), norm and LM head on a machine."""
    num_layers = sizes.num_layers - split
    return Load(sizes.tail(split) + _cache(num_layers, room), num_layers * room.layer_s + room.lm_head_s)


def check_head_fits(sizes: ModelSizes, split: int, room: Room) -> None:
    """SplitInvalid if a split that was chosen elsewhere does not fit this machine as head."""
    _check(head_load(sizes, split, room), room, f"embeddings and layers 0 to {split - 1}")


def check_tail_fits(sizes: ModelSizes, split: int, room: Room) -> None:
    """SplitInvalid if a split that was chosen elsewhere does not fit this machine as tail."""
    _check(tail_load(sizes, split, room), room, f"layers {split} to {sizes.num_layers - 1} and LM head")


def _check(load: Load, room: Room, what: str) -> None:
    if load.num_bytes > room.free_bytes:
        raise SplitInvalid(
            f"{what} with {room.slots} slots need {_gb(load.num_bytes)}, and {_gb(room.free_bytes)} are free; "
            "give another --split, or less to hold: --quantization nf4, a smaller --max-length, fewer --slots"
        )


def _cache(num_layers: int, room: Room) -> int:
    """Of all slots and the scratch slot."""
    return (room.slots + 1) * (num_layers * room.slot_layer_bytes + room.slot_bytes)


def _nowhere(sizes: ModelSizes, head: Room, tail: Room) -> str:
    numbers = range(sizes.num_layers + 1)
    first = [split for split in numbers if head_load(sizes, split, head).num_bytes <= head.free_bytes]
    last = [
        number for number in numbers if tail_load(sizes, sizes.num_layers - number, tail).num_bytes <= tail.free_bytes
    ]
    of_head = f"the embeddings and {max(first)} layers" if first else "not even the embeddings"
    of_tail = f"{max(last)} layers and the LM head" if last else "not even the LM head"
    return (
        f"the model's {sizes.num_layers} layers, {_gb(sizes.whole(tied=False))} fit these machines nowhere: "
        f"the head's {_gb(head.free_bytes)} hold {of_head} with {head.slots} slots, "
        f"the tail's {_gb(tail.free_bytes)} hold {of_tail} with {tail.slots} slots; "
        "give less to hold: --quantization nf4, a smaller --max-length, fewer --slots"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
