"""The texts that somebody follows, on their way out of the engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator


class ShownTexts:
    """The engine's thread shows texts here, another one takes the newest. Costs a look-up where nobody follows."""

    def __init__(self) -> None:
        self._followed: frozenset[str] = frozenset()
        self._asked: deque[str] = deque()
        self._newest: dict[tuple[str, int], str] = {}
        self._lock = threading.Lock()

    def follow(self, task_ids: Iterable[str], anew: Iterable[str] = ()) -> None:
        """These tasks are followed from now on, and no others; the texts of those `anew` are wanted now."""
        self._followed = frozenset(task_ids)
        self._asked.extend(anew)

    def wants(self, task_id: str) -> bool:
        """Whether somebody follows this task."""
        return task_id in self._followed

    def asked(self) -> Iterator[str]:
        """The tasks whose texts are wanted now, each once."""
        while self._asked:
            yield self._asked.popleft()

    def show(self, task_id: str, choice: int, text: str) -> None:
        """The text of a choice as far as it is certain to stay."""
        with self._lock:
            self._newest[task_id, choice] = text

    def take(self) -> dict[tuple[str, int], str]:
        """By task and choice, the texts shown since the last call."""
        with self._lock:
            newest, self._newest = self._newest, {}
        return newest
