"""A job's log probabilities, as tails tell them and as its outcome says them."""

from __future__ import annotations

from collections.abc import Sequence

from relay.messages import TokenLogprobs
from tasks.generation import Alternative, TokenLogprob
from workers.head.spelling import Spelling


class Likelihoods:
    """Those of one job's committed tokens, in order."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._told: list[TokenLogprob] = []

    def extend(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Tokens were committed with these; the first ones of `logprobs` if there are more of them."""
        self._told.extend(self._of(*pair) for pair in zip(tokens, logprobs, strict=False))

    @property
    def told(self) -> tuple[TokenLogprob, ...]:
        """One for each token."""
        return tuple(self._told)

    def _of(self, token: int, logprobs: TokenLogprobs) -> TokenLogprob:
        top = zip(logprobs.top, logprobs.top_logprobs, strict=True)
        return TokenLogprob(self._spell(token, logprobs.chosen), tuple(self._spell(*pair) for pair in top))

    def _spell(self, token: int, logprob: float) -> Alternative:
        return Alternative(token, *self._spelling(token), logprob)
