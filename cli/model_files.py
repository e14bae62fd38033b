"""A model's files, in a process that may import torch."""

from __future__ import annotations

from cli.ticker import Ticker
from workers.engine.source import resolve


def prepare_model(model: str) -> str:
    """Download or convert the model if need be; one line about the result. Raises WorkerError."""
    with Ticker(f"preparing {model}") as ticker:

        def progress(what: str, done: int, total: int) -> None:
            ticker.tick(f"{what} {done}/{total}")

        found = resolve(model, progress=progress)
    return f"{found.path}: {found.num_layers} layers, context {found.context}"
