"""A model's files, in a process that may import torch."""

from __future__ import annotations

from cli.ticker import Ticker
from workers.engine.source import PreparedModel, prepare


def prepare_model(model: str) -> PreparedModel:
    """Download or convert the model if need be, and look at all of its files. Raises WorkerError."""
    with Ticker(f"preparing {model}") as ticker:

        def progress(what: str, done: int, total: int) -> None:
            ticker.tick(f"{what} {done}/{total}")

        return prepare(model, progress=progress)
