"""Drafters: guessing the next tokens so that the target can verify several at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from workers.engine.loader import LoadFormat, load_config, load_whole
from workers.engine.quantization import Quantization
from workers.errors import DrafterInvalid
from workers.head.drafters.drafter import NOTHING, Drafter, DraftRow, Proposal
from workers.head.drafters.hybrid import HybridDrafter
from workers.head.drafters.model import ModelDrafter
from workers.head.drafters.ngram import NgramDrafter
from workers.head.drafters.none import NoDrafter
from workers.head.drafters.suffix import SuffixDrafter
from workers.head.drafters.vocabulary import check_same_vocabulary

__all__ = [
    "NOTHING",
    "DraftRow",
    "Drafter",
    "DrafterKind",
    "Proposal",
    "check_same_vocabulary",
    "make_drafter",
]

DrafterKind = Literal["none", "ngram", "suffix", "model", "hybrid"]

#: tokens of a slot that the drafter's model takes in one forward while it catches up
CATCH_UP_CHUNK = 128


def make_drafter(
    kind: DrafterKind,
    *,
    target: Path,
    drafter: Path | None,
    dtype: torch.dtype | str,
    device: torch.device | str,
    slots: int,
    max_length: int,
    load_format: LoadFormat = "auto",
    graphs: bool = False,
    quantization: Quantization = "none",
) -> Drafter:
    """The drafter for a head of `slots` slots of `max_length` tokens each.

    Args:
        target: directory of the target model.
        drafter: directory of the drafter's model, for `kind` "model" and "hybrid" only.
        dtype: of the drafter's weights and cache.
        device: where it runs.
        load_format: where the drafter's weights come from.
        graphs: record the loop of a draft once per shape.
        quantization: of the drafter's own layers.

    Raises:
        DrafterInvalid: `kind` "model" or "hybrid" without a directory.
        VocabularyMismatch: the drafter's tokenizer gives a token another id than the target's.
        WorkerError: the drafter's model cannot be loaded.
    """
    if kind == "none":
        return NoDrafter()
    if kind == "ngram":
        return NgramDrafter()
    if kind == "suffix":
        return SuffixDrafter()
    if drafter is None:
        raise DrafterInvalid(f'drafter "{kind}" needs a drafter model')
    check_same_vocabulary(target, drafter)
    model = load_whole(
        drafter,
        dtype=dtype,
        device=device,
        slots=slots,
        max_length=max_length,
        max_query=CATCH_UP_CHUNK,
        load_format=load_format,
        graphs=graphs,
        quantization=quantization,
    )
    modelled = ModelDrafter(model, num_tokens=load_config(target).vocab_size)
    return modelled if kind == "model" else HybridDrafter(SuffixDrafter(), modelled)
