"""The few figures by which two batches are compared."""

from __future__ import annotations

from storage.database import Database
from storage.figures import batch_figures
from storage.percentiles import distribution

#: medians over jobs
_MEDIANS = ("decode_tps", "ttft_s", "e2e_s", "queue_s")


def speeds(database: Database, batch_id: str) -> dict[str, float | None]:
    """Name → figure; None where nothing was measured."""
    figures = batch_figures(database, batch_id)
    found = distribution(database, batch_id).percentiles
    return {
        "batch_tps": figures.batch_tps,
        **{f"{name}_p50": found[name].p50 if name in found else None for name in _MEDIANS},
        "acceptance": figures.acceptance,
        "tokens_per_round": figures.tokens_per_round,
        "completion_tokens": figures.completion_tokens,
        "wire_bytes_up": figures.wire_bytes_up,
    }
