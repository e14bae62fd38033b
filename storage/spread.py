"""Amounts spread over stretches of time, summed in equal intervals. No database."""

from __future__ import annotations


class Spread:
    """`number` intervals from `start`, each `width_s` long; what is added costs the same however long it lasts."""

    def __init__(self, start: float, width_s: float, number: int) -> None:
        self._start, self._width_s = start, width_s
        #: what lies in parts of intervals
        self._parts = [0.0] * number
        #: changes of what fills whole intervals
        self._steps = [0.0] * (number + 1)

    def add(self, begin: float, end: float, amount: float) -> None:
        """Spread `amount` evenly from `begin` to `end`; both lie in the intervals. All at once if they are the same."""
        first, last = self._index(begin), self._index(end)
        if first == last or end <= begin:
            self._parts[last] += amount
            return
        per_s = amount / (end - begin)
        self._parts[first] += (self._begin(first + 1) - begin) * per_s
        self._parts[last] += (end - self._begin(last)) * per_s
        self._steps[first + 1] += self._width_s * per_s
        self._steps[last] -= self._width_s * per_s

    def per_s(self) -> tuple[float, ...]:
        """For each interval what lies in it, per second."""
        values, whole = [], 0.0
        for part, step in zip(self._parts, self._steps, strict=False):
            whole += step
            # Steps up and down cancel but for rounding.
            values.append(max(0.0, part + whole) / self._width_s)
        return tuple(values)

    def _index(self, at: float) -> int:
        return max(0, min(len(self._parts) - 1, int((at - self._start) / self._width_s)))

    def _begin(self, index: int) -> float:
        return self._start + index * self._width_s
