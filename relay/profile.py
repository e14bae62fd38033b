"""What makes two heads interchangeable: everything of the target model that can change a job's text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from relay.plain import from_plain

#: of a fingerprint: no two models begin alike
_SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Profile:
    """The identity of a served target model.

    Two workers may serve the same jobs, or be the two halves of one model, only if their profiles are equal.
    """

    #: hex digest over config, tokenizer, generation config and all tensors' (name, dtype, shape)
    fingerprint: str
    #: compute dtype: "float32", "float16" or "bfloat16"
    dtype: str
    #: "none", "nf4" or "int8"
    quantization: str
    #: dtype of the hidden states on the wire; equal to `dtype` unless shrunk on purpose
    wire_dtype: str
    deterministic: bool
    #: longest prompt + completion a job may have, in tokens
    context: int

    def to_json(self) -> dict[str, Any]:
        """This profile as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Profile:
        """The profile that `to_json` wrote. Raises ValueError for anything else."""
        return from_plain(cls, value)

    def differences(self, other: Profile) -> list[str]:
        """One line per differing field, `name: mine ≠ theirs`; empty when the profiles are equal."""
        mine, theirs = _shown(self), _shown(other)
        return [f"{name}: {mine[name]} ≠ {theirs[name]}" for name in self.differing(other)]

    def differing(self, other: Profile) -> list[str]:
        """The names of the fields that differ."""
        mine, theirs = asdict(self), asdict(other)
        return [name for name in mine if mine[name] != theirs[name]]


def _shown(profile: Profile) -> dict[str, Any]:
    """Its fields as people compare them."""
    return {**asdict(profile), "fingerprint": profile.fingerprint[:_SHOWN_DIGITS]}
