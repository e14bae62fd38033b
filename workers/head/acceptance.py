"""How likely drafted tokens are to be accepted, learned from verdicts. No torch, no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: acceptance of a drafter nothing is known of
START_ACCEPTANCE = 0.6
#: no draft token counts as surer than this
MOST_SURE = 0.995


def _hopeful(rate: float, tries: float) -> float:
    """A rate plus its standard error: what was tried little is tried more, or bad luck would have the last word."""
    return rate + math.sqrt(rate * (1.0 - rate) / tries)


class Acceptance:
    """How often drafted tokens are accepted, by depth: a running estimate of which old rounds fade out.

    Depth matters: where a drafter found the right place its whole draft tends to be right. With little seen at a
    depth the estimate leans on the row's overall rate, and with little seen of the row on the batch (`prior`).
    """

    #: tokens' worth of trust in the prior
    PRIOR_WEIGHT = 4.0

    def __init__(self, prior: Acceptance | None = None, *, memory: float = 32.0) -> None:
        """`memory`: rounds over which a round's weight falls to 1/e."""
        self._prior = prior
        self._fade = math.exp(-1.0 / memory)
        self._tested: list[float] = []
        self._accepted: list[float] = []

    def observe(self, drafted: int, accepted: int) -> None:
        """A round sent `drafted` tokens, of which the first `accepted` were right."""
        if not drafted:
            return
        tested = min(accepted + 1, drafted)
        self._tested = [count * self._fade for count in self._tested]
        self._accepted = [count * self._fade for count in self._accepted]
        missing = tested - len(self._tested)
        self._tested += [0.0] * missing
        self._accepted += [0.0] * missing
        for depth in range(tested):
            self._tested[depth] += 1.0
        for depth in range(accepted):
            self._accepted[depth] += 1.0

    @property
    def rate(self) -> float:
        """Probability that a token is accepted if those before it were, whatever the depth."""
        prior = START_ACCEPTANCE if self._prior is None else self._prior.rate
        weight = self.PRIOR_WEIGHT
        return (weight * prior + sum(self._accepted)) / (weight + sum(self._tested))

    def conditional(self, limit: int) -> list[float]:
        """The same for each of the first `limit` depths, on the hopeful side."""
        rate, weight = self.rate, self.PRIOR_WEIGHT
        if self._prior is None:
            leaning = [_hopeful(rate, weight + sum(self._tested))] * limit
        else:
            better = rate / max(self._prior.rate, 1e-6)
            leaning = [chance * better for chance in self._prior.conditional(limit)]
        tested = self._tested[:limit] + [0.0] * (limit - len(self._tested))
        accepted = self._accepted[:limit] + [0.0] * (limit - len(self._accepted))
        return [
            min(MOST_SURE, (weight * lean + hits) / (weight + tries))
            for lean, hits, tries in zip(leaning, accepted, tested, strict=True)
        ]


class Calibration:
    """What a drafter's confidence is worth: the acceptance of tokens of like confidence, learned from verdicts."""

    #: classes of confidence
    NUM_CLASSES = 20
    #: tokens' worth of trust in the drafter's own word
    PRIOR_WEIGHT = 8.0
    #: tokens of a class over which old ones fade to 1/e
    MEMORY = 400.0

    def __init__(self) -> None:
        self._tested = [0.0] * self.NUM_CLASSES
        self._accepted = [0.0] * self.NUM_CLASSES

    def observe(self, confidence: Sequence[float], accepted: int) -> None:
        """A draft of such confidences was sent, of which the first `accepted` tokens were right."""
        fade = 1.0 - 1.0 / self.MEMORY
        for depth, sure in enumerate(confidence[: accepted + 1]):
            index = self._class(sure)
            self._tested[index] = self._tested[index] * fade + 1.0
            self._accepted[index] = self._accepted[index] * fade + (depth < accepted)

    def probability(self, confidence: float) -> float:
        """Probability that such a token is accepted if those before it were, on the hopeful side."""
        index, weight = self._class(confidence), self.PRIOR_WEIGHT
        chance = (weight * confidence + self._accepted[index]) / (weight + self._tested[index])
        return min(MOST_SURE, _hopeful(chance, weight + self._tested[index]))

    def _class(self, confidence: float) -> int:
        return min(int(confidence * self.NUM_CLASSES), self.NUM_CLASSES - 1)
