"""The bytes of the tokens of a text are the bytes of the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.unit.test_completion import byte_fallback, byte_ids, byte_level, ids
from workers.head.spelling import Spelling


@pytest.mark.parametrize("text", ["hello world", "aé😀b", "你好，世界。", "\x00\t\n\x7f\xa0\xad", "👨‍👩‍👧!"])
def test_the_bytes_of_byte_level_tokens_are_those_of_the_text(text: str) -> None:
    spelling = Spelling(byte_level())
    for run in (ids(text), byte_ids(text.encode())):
        assert b"".join(bytes(spelling(token).bytes) for token in run) == text.encode()


@given(st.text(max_size=30))
@settings(deadline=None)
def test_any_texts_bytes_are_those_of_its_tokens(text: str) -> None:
    spelling = Spelling(byte_level())
    assert b"".join(bytes(spelling(token).bytes) for token in ids(text)) == text.encode()


def test_a_part_of_a_character_has_its_real_byte_and_a_text_that_says_it_is_none() -> None:
    spelling = Spelling(byte_level())
    first, *_ = byte_ids("😀".encode())
    assert spelling(first) == ("\ufffd", (0xF0,))


def test_byte_fallback_tokens_are_their_byte_and_the_mark_of_a_word_is_a_space() -> None:
    spelling, tokenizer = Spelling(byte_fallback()), byte_fallback()
    assert spelling(tokenizer.token_to_id("<0xE4>")) == ("\ufffd", (0xE4,))
    assert spelling(tokenizer.token_to_id("<0x41>")) == ("A", (0x41,))
    assert spelling(tokenizer.token_to_id("▁hello")) == (" hello", tuple(b" hello"))
    assert spelling(tokenizer.token_to_id("你")) == ("你", tuple("你".encode()))
    run = [tokenizer.token_to_id(word) for word in ("▁hello", "▁world", "<0xE4>", "<0xBD>", "<0xA0>", "a")]
    spelled = b"".join(bytes(spelling(token).bytes) for token in run).decode()
    assert spelled == " " + tokenizer.decode(run) == " hello world你a"


def test_a_metaspace_decoder_writes_spaces_for_marks() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "<0x41>": 1}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    spelling = Spelling(tokenizer)
    assert spelling(0).text == " a"
    assert spelling(1).text == "<0x41>"  # without byte fallback that is a word


def test_added_tokens_are_spelled_as_they_are_written() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.add_tokens([AddedToken("é é", normalized=False)])
    spelling = Spelling(tokenizer)
    assert spelling(1) == ("<|im_end|>", tuple(b"<|im_end|>"))
    assert spelling(2) == ("é é", tuple("é é".encode()))


def test_an_id_without_an_entry_has_neither_text_nor_bytes() -> None:
    assert Spelling(byte_level())(10**6) == ("", ())


def test_a_tokenizer_without_a_decoder_is_read_as_it_is() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"ab": 0}, merges=[]))
    assert Spelling(tokenizer)(0) == ("ab", (97, 98))
