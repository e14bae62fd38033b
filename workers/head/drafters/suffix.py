"""Suffix drafting: what followed the row's last tokens in its own text and in the batch's other outputs.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): the end of a row is looked up both in its own prompt and
output and in the outputs of other jobs, and the continuation that was seen most often is drafted, the surer the
longer the match and the more its occurrences agree. Where that work keeps suffix trees, here tables of n-grams of a
few lengths lead to the latest occurrences, whose true match length is then read from the texts. That asks a fraction
of a tree's memory, and the oldest outputs are forgotten as cheaply as they were learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import NamedTuple

from workers.head.drafters.drafter import NOTHING, DraftRow, Proposal

#: lengths of the n-grams that are indexed; the longest that occurred leads
NGRAMS = (8, 4, 2)
#: tokens back over which a match is measured
LONGEST_MATCH = 32
#: most occurrences of an n-gram that are remembered: the latest
MOST_OCCURRENCES = 8
#: tokens of outputs, finished and running, that are remembered; each costs at most about 0.7 KB
MOST_TOKENS = 65_536
#: matched tokens that make a continuation as likely right as wrong
DOUBT = 2.0
#: an occurrence is one integer: the text's serial number above so many bits of the place in it
_PLACE_BITS = 24


@dataclass(slots=True, eq=False)
class Text:
    """Tokens in which n-grams are looked up."""

    tokens: list[int] = field(default_factory=list)
    serial: int = 0


class NgramTable:
    """Where n-grams occurred lately: each leads to the places behind its latest occurrences, oldest first."""

    def __init__(self) -> None:
        self._occurrences: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._occurrences)

    def add(self, text: Text, place: int) -> None:
        """The token at `place` continues the n-grams in front of it."""
        occurrence = text.serial << _PLACE_BITS | place
        for key in _keys(text.tokens, place):
            known = self._occurrences.get(key, ())
            self._occurrences[key] = (*known[1 - MOST_OCCURRENCES :], occurrence)

    def remove(self, text: Text, place: int) -> None:
        """Take back an `add`."""
        occurrence = text.serial << _PLACE_BITS | place
        for key in _keys(text.tokens, place):
            left = tuple(other for other in self._occurrences.get(key, ()) if other != occurrence)
            if left:
                self._occurrences[key] = left
            else:
                self._occurrences.pop(key, None)

    def find(self, key: int) -> Iterator[tuple[int, int]]:
        """(serial, place) of an n-gram's occurrences; now and then of another n-gram with the same key."""
        for occurrence in self._occurrences.get(key, ()):
            yield occurrence >> _PLACE_BITS, occurrence & ((1 << _PLACE_BITS) - 1)


def _keys(tokens: Sequence[int], end: int) -> Iterator[int]:
    """A key for each of the n-grams that end in front of place `end`, the longest first."""
    for length in NGRAMS:
        if length <= end:
            # Integers hash alike in every process: drafts do not depend on the run.
            yield hash(tuple(tokens[end - length : end]))


class OutputMemory:
    """The batch's outputs, each behind the end of its prompt: those of running jobs, and the latest finished ones."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._table = NgramTable()
        self._texts: dict[int, Text] = {}
        self._finished: dict[int, Text] = {}  # in the order of their ends
        self._num_tokens = 0
        self._last_serial = 0

    @property
    def num_tokens(self) -> int:
        """Tokens remembered."""
        return self._num_tokens

    @property
    def num_ngrams(self) -> int:
        """N-grams remembered."""
        return len(self._table)

    def begin(self, context: Sequence[int]) -> Text:
        """An output starts, behind these last tokens of its prompt."""
        self._last_serial += 1
        text = self._texts[self._last_serial] = Text(list(context), self._last_serial)
        self._num_tokens += len(text.tokens)
        return text

    def append(self, text: Text, token: int) -> None:
        """A running output grows."""
        text.tokens.append(token)
        self._table.add(text, len(text.tokens) - 1)
        self._num_tokens += 1

    def finish(self, text: Text) -> None:
        """An output is complete: it is remembered as long as there is room."""
        self._finished[text.serial] = text
        while self._finished and self._num_tokens > self._most_tokens:
            self._forget(self._finished.pop(next(iter(self._finished))))

    def find(self, key: int) -> Iterator[tuple[Text, int]]:
        """The texts and places where an n-gram's continuations stand, oldest first."""
        for serial, place in self._table.find(key):
            yield self._texts[serial], place

    def _forget(self, text: Text) -> None:
        for place in range(len(text.tokens)):
            self._table.remove(text, place)
        self._num_tokens -= len(text.tokens)
        del self._texts[text.serial]


@dataclass(slots=True)
class _Row:
    """What is kept for a slot."""

    #: prompt and output
    text: Text = field(default_factory=Text)
    #: n-grams of the prompt
    prompt: NgramTable = field(default_factory=NgramTable)
    #: the output's place in the memory; None before the first token
    output: Text | None = None
    #: the engine's own list, which goes on growing
    source: Sequence[int] = ()


class _Candidate(NamedTuple):
    """An earlier occurrence of the row's end."""

    #: how many tokens in front of it are those of the row's end
    match: int
    #: what followed
    following: Sequence[int]


class SuffixDrafter:
    """Drafts from the row's own text and the batch's other outputs, in microseconds per row.

    Other jobs' prompts are not looked at: what jobs share of them, each has in its own.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self.outputs = OutputMemory(most_tokens)
        self._rows: dict[int, _Row] = {}

    def begin(self, slot: int) -> None:
        """A new text starts in the slot."""
        self.end(slot)
        self._rows[slot] = _Row()

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """A continuation for each row whose end occurred before, else nothing."""
        for row in rows:
            self._absorb(self._rows[row.slot], row.tokens)
        return [self._propose_row(row) for row in rows]

    def end(self, slot: int) -> None:
        """The slot's output, with the tokens that came after its last draft, stays for the jobs to come."""
        row = self._rows.pop(slot, None)
        if row is not None and row.output is not None:
            self._absorb(row, row.source)
            self.outputs.finish(row.output)

    def _absorb(self, row: _Row, tokens: Sequence[int]) -> None:
        """Index the tokens that are new. A row's first draft comes with the first token of its output."""
        row.source = tokens
        text = row.text
        if row.output is None:
            for place, token in enumerate(tokens[:-1]):
                text.tokens.append(token)
                row.prompt.add(text, place)
            row.output = self.outputs.begin(text.tokens[-LONGEST_MATCH:])
        for token in tokens[len(text.tokens) :]:
            text.tokens.append(token)
            self.outputs.append(row.output, token)

    def _propose_row(self, row: DraftRow) -> Proposal:
        own = self._rows[row.slot]
        tokens = own.text.tokens
        if row.limit > 0:
            for key in _keys(tokens, len(tokens)):
                candidates = list(_candidates(own, key, self.outputs, row.limit))
                if candidates:
                    return _continue(candidates, row.limit)
        return NOTHING


def _candidates(row: _Row, key: int, outputs: OutputMemory, limit: int) -> Iterator[_Candidate]:
    """The occurrences of an n-gram of the row's end, oldest first, the own prompt's before those in outputs."""
    end = row.text.tokens
    found = [(row.text, place) for _, place in row.prompt.find(key)]
    for text, place in [*found, *outputs.find(key)]:
        match = _match(end, text.tokens, place)
        if match >= min(NGRAMS):
            following = text.tokens[place : place + limit]
            if text is row.text or text is row.output:
                # Behind the row's own end comes its draft: a loop goes round and round.
                following = list(islice(cycle(following), limit))
            yield _Candidate(match, following)


def _match(end: Sequence[int], tokens: Sequence[int], place: int) -> int:
    """How many tokens in front of `place` are those at the row's end, as far as is looked."""
    most, match = min(LONGEST_MATCH, len(end), place), 0
    while match < most and end[-1 - match] == tokens[place - 1 - match]:
        match += 1
    return match


def _continue(candidates: Sequence[_Candidate], limit: int) -> Proposal:
    """The continuation most matched tokens speak for, of equal ones the latest; candidates that differ drop out.

    A token is as sure as the share of those that speak for it, less the doubt about short and single matches.
    """
    draft: list[int] = []
    confidence: list[float] = []
    for depth in range(limit):
        candidates = [one for one in candidates if len(one.following) > depth]
        votes: dict[int, int] = {}
        for one in reversed(candidates):
            token = one.following[depth]
            votes[token] = votes.get(token, 0) + one.match + depth
        if not votes:
            break
        chosen = max(votes, key=votes.__getitem__)
        matched, total = votes[chosen], sum(votes.values())
        if matched < total:
            candidates = [one for one in candidates if one.following[depth] == chosen]
        draft.append(chosen)
        confidence.append(matched / total * matched / (matched + DOUBT))
    return Proposal(tuple(draft), tuple(confidence))
