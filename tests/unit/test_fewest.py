"""The fewest tokens of a text are never more than the tokenizer makes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.models import byte_tokenizer, smollm2_directory
from workers.engine.tokenizer import load_tokenizer
from workers.head.fewest import FewestTokens

CORPUS = ["hello world, the end of the world ----------------", "你好，世界。 naïve café", "a" + " " * 40 + "b"] * 20
#: spaces and their mark, byte tokens written out, what normal forms change, bytes that the vocabularies lack
ALPHABET = [*"ab e-▁<>0xE4É你界😀\u0301\u00a0\u2003\x04\n\t", "<0xE4>", "<eos>", "hello", " world", "<stop>", "ﬁ", "Å"]


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # as SmolLM2's: bytes that the corpus lacks have no token and vanish
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _composing() -> Tokenizer:
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _swallowing() -> Tokenizer:
    tokenizer = _byte_level()
    tokenizer.add_tokens([AddedToken("<stop>", lstrip=True, rstrip=True)])
    return tokenizer


def _fallback() -> Tokenizer:
    """As Llama 2 and Gemma: a mark for a space, single bytes for what is unknown."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁aelo", "▁▁", "▁▁▁▁", "▁a"]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "a")]
    model = models.BPE({word: i for i, word in enumerate(words)}, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_tokens([AddedToken("<stop>", normalized=True), AddedToken("▁▁▁▁▁▁▁▁▁▁", normalized=False)])
    return tokenizer


def _metaspace() -> Tokenizer:
    tokenizer = _fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "byte level": cache(_byte_level),
    "with a normal form": cache(_composing),
    "with a token that swallows white space": cache(_swallowing),
    "with byte fallback": cache(_fallback),
    "with metaspace": cache(_metaspace),
    "one token a byte": cache(lambda: byte_tokenizer().backend_tokenizer),
}


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=st.lists(st.sampled_from(ALPHABET), max_size=60).map("".join))
@settings(deadline=None, max_examples=200)
def test_no_text_has_fewer_tokens(kind: str, text: str) -> None:
    tokenizer = BOUNDED[kind]()
    assert FewestTokens(tokenizer)(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_run_of_one_piece_has_fewer_tokens(kind: str) -> None:
    tokenizer = BOUNDED[kind]()
    fewest = FewestTokens(tokenizer)
    for piece in [*ALPHABET, "\x16", "a ", " <stop> ", "é", "e\u0301", "▁ "]:
        text = piece * 1000
        assert fewest(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids), repr(piece)


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_long_text_has_a_bound_of_some_use(kind: str) -> None:
    assert FewestTokens(BOUNDED[kind]())("hello world, " * 10_000) > 1_000


def test_letters_are_not_weighed_by_the_longest_run_of_spaces() -> None:
    tokenizer = load_tokenizer(smollm2_directory()).backend_tokenizer
    text = "The quick brown fox jumps over the lazy dog. " * 1000
    longest = max(map(len, tokenizer.get_vocab()))
    assert 2 * len(text) // longest < FewestTokens(tokenizer)(text) <= len(tokenizer.encode(text).ids)


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("normalizer", normalizers.Strip()),
        ("normalizer", normalizers.Replace(Regex(" +"), " ")),
        ("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        ("pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        ("model", models.WordLevel({"a": 0}, unk_token="a")),
        ("model", models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
    ],
)
def test_where_a_text_may_lose_characters_nothing_is_claimed(changed: str, value: object) -> None:
    tokenizer = _fallback()
    setattr(tokenizer, changed, value)
    assert FewestTokens(tokenizer)("a " * 10_000) == 0


def test_a_text_that_a_normal_form_shortens_has_no_bound() -> None:
    fewest = FewestTokens(_composing())
    assert fewest("é" * 10_000) > 0
    assert fewest("e\u0301" * 10_000) == 0
