"""A completion ends at the right token, for the right reason, with the right text."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tasks.generation import FinishReason
from workers.head.completion import Completion, TextStream

CORPUS = [
    "hello world, this is the end. STOP here and stop there.",
    "你好，世界。",
    "smile 😀 and wave 👋 at the family 👨‍👩‍👧",
] * 10


@cache
def byte_level() -> Tokenizer:
    """A small byte-level BPE; `<eos>` is 0 and `<pad>` 1, both special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """A sentencepiece-like vocabulary: words with a leading space, and single bytes for everything else."""
    words = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁world", "a", "▁", "你"]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def ids(text: str) -> list[int]:
    return list(byte_level().encode(text).ids)


def byte_ids(data: bytes) -> list[int]:
    """One token for each byte."""
    characters = _byte_characters()
    return [byte_level().token_to_id(characters[byte]) for byte in data]


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def completion(stop: tuple[str, ...] = (), max_tokens: int = 1000, ignore_eos: bool = False) -> Completion:
    return Completion(byte_level(), max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos, eos_ids=(0,))


def test_a_completion_goes_on_until_something_ends_it() -> None:
    job = completion()
    assert job.commit(ids("hello")) is None
    assert job.commit(ids(" world")) is None
    assert job.text == "hello world"
    assert job.finish_reason is None


def test_an_end_of_sequence_token_within_an_accepted_run_drops_what_follows() -> None:
    job = completion()
    assert job.commit([*ids("hello"), 0, *ids(" world"), 0]) is FinishReason.STOP
    assert job.tokens == (*ids("hello"), 0)
    assert job.text == "hello"


def test_an_ignored_end_of_sequence_token_counts_but_leaves_no_text() -> None:
    job = completion(ignore_eos=True, max_tokens=4)
    assert job.commit([*byte_ids(b"a"), 0, 0, *byte_ids(b"bc")]) is FinishReason.LENGTH
    assert job.tokens == (*byte_ids(b"a"), 0, 0, *byte_ids(b"b"))
    assert job.text == "ab"


def test_an_end_of_sequence_token_that_is_not_special_leaves_no_text_either() -> None:
    (mark,) = byte_ids(b"#")
    job = Completion(byte_level(), max_tokens=9, eos_ids=(0, mark))
    assert job.commit([*ids("hello"), mark]) is FinishReason.STOP
    assert job.text == "hello"
    assert job.tokens[-1] == mark


def test_max_tokens_cuts_within_an_accepted_run() -> None:
    job = completion(max_tokens=5)
    run = byte_ids(b"abcdefgh")
    assert job.commit(run[:3]) is None
    assert job.commit(run[3:]) is FinishReason.LENGTH
    assert job.tokens == tuple(run[:5])
    assert job.text == "abcde"


def test_the_end_of_sequence_token_as_the_last_allowed_one_is_a_stop() -> None:
    assert completion(max_tokens=2).commit([*byte_ids(b"a"), 0]) is FinishReason.STOP


def test_a_stop_string_completed_at_exactly_max_tokens_is_a_stop() -> None:
    job = completion(stop=("cd",), max_tokens=4)
    assert job.commit(byte_ids(b"abcd")) is FinishReason.STOP
    assert job.text == "ab"
    assert job.num_tokens == 4


def test_a_stop_string_one_token_behind_max_tokens_is_not_seen() -> None:
    job = completion(stop=("cd",), max_tokens=3)
    assert job.commit(byte_ids(b"abcd")) is FinishReason.LENGTH
    assert job.text == "abc"


def test_a_stop_string_over_several_tokens_and_rounds_is_found() -> None:
    job = completion(stop=("STOP",))
    for token in byte_ids(b"hello ST"):
        assert job.commit([token]) is None
    assert job.commit(byte_ids(b"OP and on")) is FinishReason.STOP
    assert job.text == "hello "
    assert job.tokens == tuple(byte_ids(b"hello STOP"))


def test_a_stop_string_may_begin_and_end_within_tokens() -> None:
    run = ids("hello world")
    assert len(run) < len("hello world") - 2
    job = completion(stop=("lo wor",))
    assert job.commit(run) is FinishReason.STOP
    assert job.text == "hel"


def test_the_stop_string_that_begins_first_wins_when_one_token_completes_two() -> None:
    run = ids("hello world")
    for stops in [("llo", "ello"), ("ello", "llo")]:
        job = completion(stop=stops)
        job.commit(run)
        assert job.text == "h"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    job = completion(stop=("bcdef", "cd"))
    assert job.commit(byte_ids(b"abcdef")) is FinishReason.STOP
    assert job.text == "ab"
    assert job.num_tokens == 4


def test_a_stop_string_may_hold_characters_of_several_bytes() -> None:
    job = completion(stop=("界",))
    assert job.commit(byte_ids("你好世界。".encode())) is FinishReason.STOP
    assert job.text == "你好世"
    assert job.num_tokens == len("你好世界".encode())


def test_a_stop_string_in_front_of_half_a_character_is_seen_at_once() -> None:
    half = _byte_characters()[0xE4]
    words = [*_byte_characters(), f"p{half}"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[("p", half)]))
    tokenizer.decoder = decoders.ByteLevel()
    job = Completion(tokenizer, max_tokens=9, stop=("stop",))
    assert job.commit([*b"a sto", 256, *b"bcd"]) is FinishReason.STOP
    assert (job.text, job.num_tokens) == ("a ", 6)


@pytest.mark.parametrize("text", ["😀", "👨‍👩‍👧!", "你好，世界。", "aé😀b", "naïve"])
def test_characters_of_several_tokens_arrive_whole(text: str) -> None:
    job = completion()
    for token in byte_ids(text.encode()):
        job.commit([token])
        assert "\ufffd" not in job.text
        assert text.startswith(job.text)
    assert job.text == text


def test_a_character_cut_off_by_max_tokens_is_what_the_tokenizer_makes_of_it() -> None:
    run = byte_ids("a😀".encode())[:-1]
    job = completion(max_tokens=len(run))
    assert job.commit(run) is FinishReason.LENGTH
    assert job.text == byte_level().decode(run) == "a\ufffd"


def test_tokens_after_the_end_are_dropped_in_later_rounds_too() -> None:
    job = completion()
    job.commit([*ids("hello"), 0])
    assert job.commit(ids(" world")) is FinishReason.STOP
    assert job.text == "hello"


def test_an_end_at_the_first_token_gives_an_empty_text() -> None:
    job = completion()
    assert job.commit([0, 5]) is FinishReason.STOP
    assert (job.text, job.tokens) == ("", (0,))


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"stop": ("a", "")}])
def test_what_can_never_end_right_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"max_tokens|stop"):
        completion(**wrong)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 329), min_size=1, max_size=40), st.data())
@settings(deadline=None)
def test_an_uncut_text_is_what_the_tokenizer_decodes_at_once(run: list[int], data: st.DataObject) -> None:
    run = [token % byte_level().get_vocab_size() for token in run]
    job = completion(max_tokens=len(run), ignore_eos=True)
    split = data.draw(st.integers(0, len(run)))
    job.commit(run[:split])
    job.commit(run[split:])
    assert job.text == byte_level().decode(run, skip_special_tokens=True)


@given(st.lists(st.integers(0, 329), max_size=40))
@settings(deadline=None)
def test_a_streamed_text_is_the_decoded_one_without_its_unfinished_end(run: list[int]) -> None:
    stream = TextStream(byte_level())
    for place, token in enumerate(run):
        stream.append(token % byte_level().get_vocab_size())
        decoded = byte_level().decode([t % byte_level().get_vocab_size() for t in run[: place + 1]])
        assert stream.text == decoded.rstrip("\ufffd")


@given(st.lists(st.sampled_from([0, 0x42, 0x43, 0xE5, 0xBE, 0xA1, 257, 258, 259, 260, 261]), max_size=25))
@settings(deadline=None)
def test_bytes_that_never_become_a_character_raise_nothing(run: list[int]) -> None:
    job = Completion(byte_fallback(), max_tokens=max(1, len(run)), ignore_eos=True)
    for token in run:
        before = job.text
        job.commit([token])
        assert job.finish_reason or job.text.startswith(before)
    assert job.text == byte_fallback().decode(run, skip_special_tokens=True)


@given(
    st.text(st.sampled_from("abc😀"), max_size=12),
    st.lists(st.text(st.sampled_from("abc😀"), min_size=1), max_size=3),
)
@settings(deadline=None)
def test_the_text_ends_where_a_search_after_every_token_would_end_it(text: str, stops: list[str]) -> None:
    run = byte_ids(text.encode())
    job = completion(stop=tuple(stops))
    job.commit(run)
    for count in range(1, len(run) + 1):
        so_far = byte_level().decode(run[:count]).rstrip("\ufffd")
        places = [so_far.find(stop) for stop in stops if stop in so_far]
        if places:
            assert (job.finish_reason, job.num_tokens) == (FinishReason.STOP, count)
            assert job.text == so_far[: min(places)]
            return
    assert job.finish_reason is None
    job.commit([0])
    assert job.text == text


@pytest.mark.parametrize(
    ("text", "stop", "certain"),
    [
        ("one two", (), "one two"),
        ("one two", ("three",), "one two"),
        ("one two", ("two!", "wo?"), "one "),
        ("one two", ("owl",), "one tw"),
        ("one STO", ("STOP",), "one "),
        ("STO", ("STOP",), ""),
        ("one SSS", ("SST",), "one S"),
    ],
)
def test_an_unfinished_text_leaves_out_what_may_become_a_stop_string(
    text: str, stop: tuple[str, ...], certain: str
) -> None:
    job = completion(stop=stop)
    assert job.commit(ids(text)) is None
    assert job.text == certain


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("abc 你😀")), stop=st.lists(st.text("abc 你", min_size=1, max_size=4), max_size=2))
def test_an_unfinished_text_is_always_the_beginning_of_the_finished_one(text: str, stop: list[str]) -> None:
    tokens, job = ids(text), completion(stop=tuple(stop))
    whole = completion(stop=tuple(stop))
    whole.commit([*tokens, 0])
    for token in tokens:
        assert whole.text.startswith(job.text)
        job.commit([token])
    assert whole.text.startswith(job.text)


def limited(min_tokens: int, *, stop: tuple[str, ...] = (), **more: object) -> Completion:
    settings = {"max_tokens": 9, "eos_ids": (0,), **more}
    return Completion(byte_level(), stop=stop, min_tokens=min_tokens, **settings)  # type: ignore[arg-type]


def test_a_stop_token_ends_the_text_as_an_end_of_sequence_token_does() -> None:
    (mark,) = byte_ids(b"#")
    job = limited(0, stop_ids=(mark,))
    assert job.commit(byte_ids(b"ab#cd")) is FinishReason.STOP
    assert (job.text, job.tokens) == ("ab", tuple(byte_ids(b"ab#")))


def test_a_stop_token_ends_the_text_even_where_it_is_an_ignored_end_of_sequence_token() -> None:
    job = limited(0, ignore_eos=True, stop_ids=(0,))
    assert job.commit([*byte_ids(b"ab"), 0, *byte_ids(b"cd")]) is FinishReason.STOP
    assert job.text == "ab"


@pytest.mark.parametrize("min_tokens", range(5))
def test_no_token_up_to_the_minimum_ends_the_text(min_tokens: int) -> None:
    (mark,) = byte_ids(b"#")
    job = limited(min_tokens, stop_ids=(mark,))
    job.commit([*byte_ids(b"##"), 0, *byte_ids(b"#aa#")])
    ends = [place for place in (1, 2, 3, 4, 7) if place > min_tokens]
    assert (job.finish_reason, job.num_tokens) == (FinishReason.STOP, ends[0])


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 2), (1, 2), (2, 5), (4, 5), (5, 8), (8, 9)])
def test_a_stop_string_complete_within_the_minimum_does_not_end_the_text_nor_later_on(
    min_tokens: int, num_tokens: int
) -> None:
    job = limited(min_tokens, stop=("ab", "much longer"))
    job.commit(byte_ids(b"abxabxabx"))
    assert job.num_tokens == num_tokens
    assert job.text == "abxabxabx"[: num_tokens - 2 if num_tokens < 9 else 9]


def test_a_stop_string_that_begins_within_the_minimum_and_ends_behind_it_ends_the_text() -> None:
    job = limited(2, stop=("bcd",))
    assert job.commit(byte_ids(b"abcde")) is FinishReason.STOP
    assert (job.text, job.num_tokens) == ("a", 4)


def test_max_tokens_ends_the_text_before_the_minimum() -> None:
    assert limited(99, max_tokens=3).commit(byte_ids(b"abcd")) is FinishReason.LENGTH


SPECIAL = {0: "<eos>", 1: "<pad>"}


def spelled(stop: tuple[str, ...], **more: object) -> Completion:
    settings = {"max_tokens": 99, "ignore_eos": True, "eos_ids": (0,), "special": SPECIAL, **more}
    return Completion(byte_level(), stop=stop, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "stop", "text", "num_tokens"),
    [
        ([*b"ab", 1, *b"cd"], ("<pad>",), "ab", 3),
        ([*b"ab", 0, *b"cd"], ("<eos>",), "ab", 3),
        ([*b"a\n", 1, *b"cd"], ("\n<pad>",), "a", 3),
        ([*b"a\n", 0, *b"\n", 1, *b"cd"], ("\n<pad>",), "a\n", 5),
        ([*b"a", 1, *b"bcd"], ("<pad>bc",), "a", 4),
        ([*b"a", 0, 1, *b"b"], ("<eos><pad>",), "a", 3),
        ([*b"ab", 0, *b"c", 1, *b"d"], ("b<eos>c<pad>",), "a", 5),
        # a stop string may begin within one special token
        ([*b"a", 0, 1], ("os><pad>",), "a", 3),
        # what is spelled out by ordinary tokens
        ([*b"a<pad>b"], ("<pad>",), "a", 6),
        # an ordinary stop string sees no special token between, as always
        ([*b"a", 1, *b"bc"], ("ab", "<eos>"), "", 3),
        # the one that begins first
        ([*b"ab", 1, *b"c"], ("<pad>", "b<pad>"), "a", 3),
        ([*b"ab", 1, 1, *b"c"], ("<eos>", "<pad>c"), "ab", 5),
    ],
)
def test_a_stop_string_that_holds_a_special_tokens_text_is_found_where_that_token_is(
    run: list[int], stop: tuple[str, ...], text: str, num_tokens: int
) -> None:
    tokens = [token if token in SPECIAL else byte_ids(bytes([token]))[0] for token in run]
    at_once, one_by_one = spelled(stop), spelled(stop)
    assert at_once.commit([*tokens, *byte_ids(b"beyond")]) is FinishReason.STOP
    for token in tokens:
        one_by_one.commit([token])
        assert text.startswith(one_by_one.text)
    assert (at_once.text, at_once.num_tokens) == (one_by_one.text, one_by_one.num_tokens) == (text, num_tokens)


def test_no_other_stop_string_is_looked_for_in_special_tokens() -> None:
    job = spelled(("pad", ">", "<pa"))
    assert job.commit([*byte_ids(b"ab"), 1, *byte_ids(b"cd")]) is None
    assert job.text == "abcd"


def test_a_special_stop_string_within_the_minimum_ends_nothing() -> None:
    job = spelled(("<pad>",), min_tokens=2)
    assert job.commit([1, *byte_ids(b"a"), 1]) is FinishReason.STOP
    assert (job.text, job.num_tokens) == ("a", 3)


@given(
    st.lists(st.sampled_from([0, 1, *b"ab\xe4\xbd\xa0"]), max_size=25),
    st.lists(st.lists(st.sampled_from(["a", "b", "<pad>", "<eos>", "你"]), min_size=1, max_size=3), max_size=3),
)
@settings(deadline=None)
def test_with_special_stop_strings_too_a_growing_text_only_grows(run: list[int], pieces: list[list[str]]) -> None:
    tokens = [token if token in SPECIAL else byte_ids(bytes([token]))[0] for token in run]
    stops = tuple(map("".join, pieces))
    whole, growing, seen = spelled(stops), spelled(stops), ""
    whole.commit(tokens)
    for token in tokens:
        growing.commit([token])
        assert growing.text.startswith(seen)
        seen = growing.text
    assert (whole.text, whole.tokens) == (growing.text, growing.tokens)
    written = byte_level().decode(list(whole.tokens), skip_special_tokens=False)
    if whole.finish_reason is None and "\ufffd" not in written:
        # special tokens are hidden from stop strings that hold no text of one
        assert not any(stop in (written if "<" in stop else whole.text) for stop in stops)


class Counting:
    """A tokenizer that remembers how many tokens it had to decode at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.most = tokenizer, 0

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        self.most = max(self.most, len(tokens))
        return str(self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))


def test_bytes_that_never_become_a_character_do_not_make_steps_longer_and_longer() -> None:
    tokenizer = Counting(byte_level())
    stream = TextStream(tokenizer)  # type: ignore[arg-type]
    (continuation,) = byte_ids(b"\xa9")

    for _ in range(500):
        stream.append(continuation)
    for token in byte_ids(b"still here"):
        stream.append(token)

    assert stream.text.endswith("still here")
    assert tokenizer.most < 50
