"""A model's files, in a process that may import torch."""

from __future__ import annotations

from dataclasses import dataclass

from cli.ticker import Ticker
from workers.engine.source import resolve


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """Files of a model that can be served."""

    path: str
    num_layers: int
    context: int


def prepare_model(model: str) -> PreparedModel:
    """Download or convert the model if need be. Raises WorkerError."""
    with Ticker(f"preparing {model}") as ticker:

        def progress(what: str, done: int, total: int) -> None:
            ticker.tick(f"{what} {done}/{total}")

        found = resolve(model, progress=progress)
    return PreparedModel(str(found.path), found.num_layers, found.context)
