"""From committed tokens to a job's text: the only place that decides where a completion ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tokenizers import Tokenizer

from tasks.generation import FinishReason

#: what a decoder writes for bytes that are no character, or not yet
_REPLACEMENT = "\ufffd"
#: tokens that may wait for a character to become whole; one takes four bytes, so four tokens, at most
_MOST_PENDING = 16


class Completion:
    """The completion of one job, cut token by token.

    It ends with the first token that is an end-of-sequence or stop token, completes a stop string, or is number
    `max_tokens`; tokens behind the end are dropped, even if the target accepted them in the same round. The
    text never holds a stop string that ended it, nor special tokens, nor the token that ended it. A stop string that
    holds a special token's text is also found where that token was chosen, which leaves no text.

    Args:
        tokenizer: the target's (`backend_tokenizer` of a transformers tokenizer).
        max_tokens: at least 1, already capped by the context.
        stop: none of them empty.
        ignore_eos: take end-of-sequence tokens for ordinary ones.
        eos_ids: every end-of-sequence token of the target.
        stop_ids: tokens that end this text as end-of-sequence tokens do, whatever `ignore_eos` says.
        min_tokens: the first so many tokens end nothing: neither as end-of-sequence or stop token, nor by completing a
            stop string (as in vLLM). Only `max_tokens` does.
        special: the texts of the tokenizer's special tokens, by their ids.

    Raises:
        ValueError: `max_tokens` below 1 or an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        eos_ids: Iterable[int] = (),
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        special: Mapping[int, str] | None = None,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._stop = tuple(stop)
        self._ending = frozenset(stop_ids) | (frozenset() if ignore_eos else frozenset(eos_ids))
        self._min_tokens = min_tokens
        self._stream = TextStream(tokenizer)
        special = special or {}
        #: stop strings for which special tokens have to be written out
        self._spelled_stop = tuple(each for each in stop if any(text in each for text in special.values()))
        self._written = WrittenText(special) if self._spelled_stop else None
        self._tokens: list[int] = []
        self._text: str | None = None
        self._reason: FinishReason | None = None

    def commit(self, tokens: Iterable[int]) -> FinishReason | None:
        """Append what a round committed, up to the end; the reason once the end is reached, else None."""
        for token in tokens:
            if self._reason is not None:
                break
            self._append(token)
        return self._reason

    @property
    def tokens(self) -> tuple[int, ...]:
        """Completion tokens up to the end, the one that ended it included."""
        return tuple(self._tokens)

    @property
    def num_tokens(self) -> int:
        """How many completion tokens there are."""
        return len(self._tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the completion ended; None while it goes on."""
        return self._reason

    @property
    def text(self) -> str:
        """The text up to the end; while the completion goes on, what of it is certain to stay.

        That leaves out an unfinished last character and what may turn out to be the beginning of a stop string.
        """
        if self._text is not None:
            return self._text
        text = self._stream.text
        num_certain = _num_certain(text, self._stop)
        if self._written is not None:
            written = self._written
            num_certain = min(num_certain, written.num_shown(_num_certain(written.text, self._spelled_stop)))
        return text[:num_certain]

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        may_end = len(self._tokens) > self._min_tokens
        if may_end and token in self._ending:
            self._finish(FinishReason.STOP, self._decoded(self._tokens[:-1]))
            return
        cut = self._first_stop(token)
        if cut is not None and may_end:
            self._finish(FinishReason.STOP, self._stream.text[:cut])
        elif len(self._tokens) == self._max_tokens:
            self._finish(FinishReason.LENGTH, self._decoded(self._tokens))

    def _first_stop(self, token: int) -> int | None:
        """Take one more token; where the earliest stop string begins that it completes, in characters of the text."""
        num_searched = len(self._stream.text)
        self._stream.append(token)
        places = _places(self._stream.text, self._stop, num_searched)
        if self._written is not None:
            written, num_searched_written = self._written, len(self._written.text)
            written.append(token, self._stream.text[num_searched:])
            places += map(written.num_shown, _places(written.text, self._spelled_stop, num_searched_written))
        return min(places, default=None)

    def _finish(self, reason: FinishReason, text: str) -> None:
        self._reason = reason
        self._text = text

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def _places(text: str, stops: Sequence[str], num_searched: int) -> list[int]:
    """Where stop strings begin that end behind the first `num_searched` characters: the first place of each."""
    found = (text.find(stop, max(0, num_searched - len(stop) + 1)) for stop in stops)
    return [place for place in found if place >= 0]


def _num_certain(text: str, stops: Sequence[str]) -> int:
    """Characters of `text` in front of what may turn out to be the beginning of a stop string."""
    lengths = range(min(max(map(len, stops), default=0) - 1, len(text)), 0, -1)
    unsure = next((num for num in lengths if any(stop.startswith(text[-num:]) for stop in stops)), 0)
    return len(text) - unsure


class WrittenText:
    """A text as it grows, with its special tokens written out."""

    def __init__(self, special: Mapping[int, str]) -> None:
        self._special = special
        self.text = ""
        #: where in `text` special tokens begin and end
        self._spans: list[tuple[int, int]] = []

    def append(self, token: int, shown: str) -> None:
        """Take a token that made the text without special tokens grow by `shown`."""
        self.text += shown
        if token in self._special:
            begin = len(self.text)
            self.text += self._special[token]
            self._spans.append((begin, len(self.text)))

    def num_shown(self, place: int) -> int:
        """Characters in front of `place` that are in the text without special tokens, too."""
        return place - sum(min(end, place) - begin for begin, end in self._spans if begin < place)


class TextStream:
    """Text that grows token by token, without special tokens and without half characters.

    A token's text depends on its neighbours (a character over several tokens, a space that a decoder strips
    from the first word), so each step decodes a short window: the tokens of the last piece of text and those
    since. Unlike `tokenizers.decoders.DecodeStream` it gives the whole characters of a token that ends within
    a character at once, since a stop string may end there, and takes bytes that never become a character
    without an error.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        #: all whole characters so far; grows at its end only
        self.text = ""
        #: the window; its first `_num_known` tokens decode to `_known`, which `text` holds already
        self._window: list[int] = []
        self._num_known = 0
        self._known = ""
        #: characters behind `_known` that `text` holds already
        self._num_shown = 0

    def append(self, token: int) -> None:
        """Take one more token; `text` grows by the characters that it completes."""
        self._window.append(token)
        decoded = self._decoded()
        # tokens without text, and bytes that become no character, must not let every step decode more than the last
        is_overdue = len(self._window) - self._num_known > _MOST_PENDING
        whole = decoded if is_overdue else decoded.rstrip(_REPLACEMENT)
        fresh = whole[len(self._known) + self._num_shown :]
        self.text += fresh
        self._num_shown += len(fresh)
        if is_overdue or (whole == decoded and len(decoded) > len(self._known)):
            self._advance()

    def _advance(self) -> None:
        """Begin the window behind what was known: it now ends between two characters."""
        del self._window[: self._num_known]
        self._num_known = len(self._window)
        self._known = self._decoded()
        self._num_shown = 0

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._window, skip_special_tokens=True))
