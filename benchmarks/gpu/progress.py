"""What the script is at, for whoever watches."""

from __future__ import annotations

import sys
import time


def say(text: str) -> None:
    """One line with the time of day, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
