"""The bytes of tokens, one behind the other, are those of the text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from brokers.spelling import Spelling
from tests.unit.engine.tokenizers_for_tests import CORPUS, SPECIAL, byte_fallback, byte_level
from workers.weights.scripted import EOS, byte_tokenizer

KINDS = {"bytes": byte_tokenizer(), "byte_level": byte_level(), "byte_fallback": byte_fallback()}
texts = st.text(alphabet=st.sampled_from([*sorted(set(CORPUS)), *"é😀 the"]), max_size=40)


@given(st.sampled_from(sorted(KINDS)), texts)
def test_the_bytes_of_all_tokens_are_the_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    spelling = Spelling(tokenizer)
    spelled = b"".join(map(spelling.of, tokenizer.encode(text, add_special_tokens=False).ids)).decode()
    assert spelled.removeprefix(" " if kind == "byte_fallback" else "") == text  # that kind puts a space before it


@pytest.mark.parametrize(("make", "word"), [(byte_tokenizer, EOS), (byte_level, SPECIAL), (byte_fallback, SPECIAL)])
def test_a_special_token_is_spelled_as_it_is_written(make: Callable[[], Tokenizer], word: str) -> None:
    tokenizer = make()
    assert Spelling(tokenizer).of(tokenizer.get_vocab()[word]) == word.encode()


def test_a_token_that_nobody_knows_has_no_bytes() -> None:
    assert Spelling(byte_tokenizer()).of(100_000) == b""
    assert Spelling().of(65) == b""
