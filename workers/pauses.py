"""Keeping Python's garbage collector from stopping a round."""

from __future__ import annotations

import gc


def exempt_loaded() -> None:
    """Collect once, then take everything that lives now out of the collector's sight; call it after loading.

    The libraries of a model leave some 400,000 objects that live as long as the process. A full collection would
    look at every one of them, which holds up all rows for about 0.4 s, once every few thousand rounds.
    """
    gc.collect()
    gc.freeze()
