"""How the messages from head to tail are laid out in a header; a tensor's own field follows these."""

from __future__ import annotations

from typing import Any

from relay.errors import FrameInvalid
from relay.fields import MAX_HISTORY, MAX_LANES, MAX_ROWS, Fields, pack
from relay.messages import Copy, Draft, Hello, History, Prefill, Release, Round, Tensor
from relay.profile import Profile
from relay.samplings import read_sampling, write_sampling


def write_hello(m: Hello) -> list[Any]:
    return [m.head, m.epoch, m.lanes, _write_profile(m.profile), m.split, m.slots, m.max_query]


def read_hello(f: Fields) -> Hello:
    return Hello(
        head=f.text("head"),
        epoch=f.long("epoch"),
        lanes=f.integer("lanes", 1, MAX_LANES),
        profile=_read_profile(f.item()),
        split=f.integer("split"),
        slots=f.integer("slots"),
        max_query=f.integer("max_query"),
    )


def write_prefill(m: Prefill) -> list[Any]:
    return [
        *(m.number, m.slot, m.generation, m.round, m.position, m.token, m.last),
        write_sampling(m.sampling),
        _write_copy(m.copy),
        _write_history(m.history),
    ]


def read_prefill(f: Fields, hidden: Tensor) -> Prefill:
    return Prefill(
        number=f.long("number"),
        slot=f.integer("slot"),
        generation=f.long("generation"),
        round=f.long("round"),
        position=f.integer("position"),
        token=f.integer("token"),
        last=f.flag("last"),
        sampling=read_sampling(f.item()),
        copy=_read_copy(f.item()),
        history=_read_history(f.item()),
        hidden=hidden,
    )


def write_round(m: Round) -> list[Any]:
    return [m.number, [[r.slot, r.generation, r.round, r.position, r.token, list(r.draft)] for r in m.rows]]


def read_round(f: Fields, hidden: Tensor) -> Round:
    number = f.long("number")
    rows = tuple(_read_draft(row) for row in f.array("rows", MAX_ROWS))
    packed = sum(1 + len(row.draft) for row in rows)
    if hidden.shape[0] != packed:
        raise FrameInvalid(f"Round.hidden: {hidden.shape[0]} rows, but its drafts need {packed}")
    return Round(number, rows, hidden)


def write_release(m: Release) -> list[Any]:
    return [m.number, m.slot, m.generation, m.round]


def read_release(f: Fields) -> Release:
    return Release(f.long("number"), f.integer("slot"), f.long("generation"), f.long("round"))


def _write_profile(profile: Profile) -> list[Any]:
    p = profile
    return [p.fingerprint, p.dtype, p.quantization, p.wire_dtype, p.deterministic, p.context]


def _read_profile(value: object) -> Profile:
    f = Fields(value, "Profile", 6)
    return Profile(
        fingerprint=f.text("fingerprint"),
        dtype=f.text("dtype"),
        quantization=f.text("quantization"),
        wire_dtype=f.text("wire_dtype"),
        deterministic=f.flag("deterministic"),
        context=f.integer("context"),
    )


def _write_copy(copy: Copy | None) -> list[Any] | None:
    return None if copy is None else [copy.slot, copy.generation, copy.length]


def _read_copy(value: object) -> Copy | None:
    if value is None:
        return None
    f = Fields(value, "Copy", 3)
    return Copy(slot=f.integer("slot"), generation=f.long("generation"), length=f.integer("length"))


def _write_history(history: History | None) -> list[Any] | None:
    if history is None:
        return None
    return [pack(history.prompt, "I", "History.prompt"), pack(history.output, "I", "History.output")]


def _read_history(value: object) -> History | None:
    if value is None:
        return None
    f = Fields(value, "History", 2)
    return History(f.packed_tokens("prompt", MAX_HISTORY), f.packed_tokens("output", MAX_HISTORY))


def _read_draft(value: object) -> Draft:
    f = Fields(value, "Draft", 6)
    return Draft(
        slot=f.integer("slot"),
        generation=f.long("generation"),
        round=f.long("round"),
        position=f.integer("position"),
        token=f.integer("token"),
        draft=f.tokens("draft"),
    )
