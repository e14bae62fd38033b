"""What the head's machine has for its half, the drafter counted."""

from __future__ import annotations

from pathlib import Path

from workers.engine.loader import load_config
from workers.engine.sizes import sizes_of
from workers.engine.source import Part, resolve
from workers.head.drafters import CATCH_UP_CHUNK
from workers.progress import log_progress
from workers.room import NOTHING_BESIDE, Beside, Machine
from workers.settings import HeadSettings


def head_machine(settings: HeadSettings, directory: Path) -> Machine:
    """The head's machine, by its settings. Raises WorkerError."""
    part = Part.WHOLE if settings.whole else Part.HEAD
    return Machine.described(settings, directory, part, max_query=settings.max_query, beside=_drafter(settings))


def _drafter(settings: HeadSettings) -> Beside:
    """The memory of a drafter that is a model on the head's device; the others take next to none of it."""
    if settings.drafter not in ("model", "hybrid") or settings.drafter_model is None:
        return NOTHING_BESIDE
    if settings.drafts_apart_on is not None:
        return NOTHING_BESIDE
    config = load_config(resolve(settings.drafter_model, Part.DESCRIPTION, progress=log_progress).path)
    sizes = sizes_of(config, settings.drafter_dtype or settings.dtype, settings.drafter_quantization)
    return Beside(
        weight_bytes=sizes.whole(tied=config.tie_word_embeddings),
        slot_bytes=sizes.slot(sizes.num_layers, settings.max_length + CATCH_UP_CHUNK),
    )
