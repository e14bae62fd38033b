"""Whether a drafter speaks the target's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workers.engine.tokenizer import load_tokenizer
from workers.errors import VocabularyMismatch

#: differing tokens named in a message
_NUM_NAMED = 3


def check_same_vocabulary(target: Path | str, drafter: Path | str) -> None:
    """Refuse a drafter whose tokenizer gives any token another id than the target's.

    Embeddings padded to different lengths do not matter: only the tokenizers of the two directories are
    compared.

    Raises:
        VocabularyMismatch: naming the first tokens that differ.
        ModelNotFound: a directory has no tokenizer.
    """
    found = differences(load_tokenizer(target).get_vocab(), load_tokenizer(drafter).get_vocab())
    if found:
        named = "; ".join(found[:_NUM_NAMED])
        raise VocabularyMismatch(
            f"drafter {drafter} has another vocabulary than {target}: {len(found)} tokens differ, first {named}"
        )


def differences(target: Mapping[str, int], drafter: Mapping[str, int]) -> list[str]:
    """One phrase per token that the two maps do not agree on, lowest id first."""
    differing = sorted(
        (target.get(token, drafter.get(token, 0)), token)
        for token in target.keys() | drafter.keys()
        if target.get(token) != drafter.get(token)
    )
    return [
        f"{token!r} is {_named(target, token)} in the target and {_named(drafter, token)} in the drafter"
        for _, token in differing
    ]


def _named(vocabulary: Mapping[str, int], token: str) -> str:
    return str(vocabulary.get(token, "missing"))
