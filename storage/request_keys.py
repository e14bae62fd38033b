"""Digests of what determines a job's text: its request and its model's profile."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

#: temperatures up to this are greedy: no noise is drawn, so the seed does not matter
GREEDY_TEMPERATURE = 1e-6

# Escaped, so that a lone surrogate can be encoded.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def request_key(model: str, request: str) -> str:
    """The digest of a served name and the JSON text of a request, whatever the order of its fields.

    Equal keys mean equal texts from one profile. Raises ValueError if `request` is no JSON object.
    """
    fields = json.loads(request)
    if not isinstance(fields, dict):
        raise ValueError("a request is a JSON object")
    if fields.get("temperature", 1.0) <= GREEDY_TEMPERATURE:
        fields.pop("seed", None)
    return _digest([model, fields])


def profile_key(profile: str) -> str:
    """The digest of the JSON text of a profile, whatever the order of its fields."""
    return _digest(json.loads(profile))


def _digest(value: Any) -> str:
    return sha256(_CANONICAL.encode(value).encode()).hexdigest()
