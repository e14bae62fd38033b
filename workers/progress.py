"""Telling how far a long preparation is, on the log: a worker may have no terminal."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def log_progress(what: str, done: int, total: int) -> None:
    """Log about every tenth of `total` steps."""
    step = max(1, total // 10)
    if done % step == 0 or done == total:
        log.info("%s: %d of %d", what, done, total)
