"""The text that is shown does not depend on how tokens arrive, ends before a stop string, and never in a character."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.unit.engine.tokenizers_for_tests import CORPUS, SPECIAL, byte_fallback, byte_level
from workers.engine.protocol import Output, Request, SamplingParams, TokenLogprobs
from workers.engine.text import TextDecoder, TextSequence, TextStage
from workers.weights.scripted import byte_tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
KINDS = {"bytes": byte_tokenizer, "byte_level": byte_level, "byte_fallback": byte_fallback}


@lru_cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def request(output: list[int] | None = None, stop: tuple[str, ...] = ()) -> Request:
    return Request("s", (1,), output=tuple(output or ()), sampling=SamplingParams(stop=stop))


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """The plain definition: the match that is complete first cuts; of two that end together, the longer."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


def chunks_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks: list[list[int]] = []
    start = 0
    while start < len(ids):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(ids[start : start + size])
        start += size
    return chunks


def show(tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: tuple[str, ...] = ()) -> list[Output]:
    """The released Outputs of a whole sequence that ends with "length"."""
    sequence = TextSequence(TextDecoder(tokenizer), request(stop=stop))
    outputs = []
    for chunk in chunks_of(ids, sizes):
        outputs.append(sequence.feed(Output("s", tuple(chunk))))
        if outputs[-1].finish:
            return outputs
    return [*outputs, sequence.feed(Output("s", finish="length"))]


def text_of(outputs: list[Output]) -> str:
    return "".join("".join(output.pieces) for output in outputs)


texts = st.text(alphabet=st.sampled_from([*sorted(set(CORPUS)), *"é😀 the"]), max_size=40)
stop_strings = st.lists(
    st.one_of(
        st.text(alphabet="the sn.!", min_size=1, max_size=4),
        st.sampled_from(["😀", "文字", "é", "</s>", "the end", "##", "\n\n", "ü"]),
    ),
    min_size=1,
    max_size=3,
).map(tuple)
splits = st.lists(st.integers(1, 5), min_size=1, max_size=6)
kinds = st.sampled_from(sorted(KINDS))


@settings(max_examples=150, deadline=None)
@given(kinds, texts, splits)
def test_any_split_of_the_tokens_gives_the_decoded_text(kind: str, text: str, sizes: list[int]) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    outputs = show(tokenizer, ids, sizes)
    assert text_of(outputs) == decode(tokenizer, ids)
    assert [token for output in outputs for token in output.tokens] == ids


@settings(max_examples=150, deadline=None)
@given(kinds, texts, splits)
def test_what_is_released_decodes_to_what_is_shown(kind: str, text: str, sizes: list[int]) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    released: list[int] = []
    shown = ""
    for output in show(tokenizer, ids, sizes):
        assert len(output.tokens) == len(output.pieces)
        released += output.tokens
        shown += "".join(output.pieces)
        assert shown == decode(tokenizer, released)


@settings(max_examples=300, deadline=None)
@given(kinds, texts, splits, stop_strings)
def test_a_stop_string_cuts_the_text_and_nothing_of_it_shows(
    kind: str, text: str, sizes: list[int], stop: tuple[str, ...]
) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = decode(tokenizer, ids)
    expected = cut_at_stop(whole, stop)
    outputs = show(tokenizer, ids, sizes, stop)
    assert text_of(outputs) == expected
    assert outputs[-1].finish == ("length" if expected == whole else "stop")
    fed, shown = 0, ""
    for output, chunk in zip(outputs[:-1], chunks_of(ids, sizes), strict=False):
        fed, shown = fed + len(chunk), shown + "".join(output.pieces)
        known = decode(tokenizer, ids[:fed]).rstrip(UNKNOWN)
        if not known.startswith(shown):  # byte fallback shows whole characters as unknown beside half a one
            continue
        begins = [at for at in range(len(known)) if any(s.startswith(known[at:]) for s in stop)]
        assert len(shown) <= min(begins, default=len(known))  # not even half of what may become one


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=24), splits)
def test_bytes_that_are_no_text_show_as_they_decode(ids: list[int], sizes: list[int]) -> None:
    tokenizer = tokenizer_of("bytes")
    outputs = show(tokenizer, ids, sizes)
    whole = decode(tokenizer, ids)
    assert text_of(outputs) in (whole, whole.removesuffix(UNKNOWN))
    assert [token for output in outputs for token in output.tokens] == ids


@settings(max_examples=150, deadline=None)
@given(kinds, texts, st.data())
def test_a_takeover_at_any_token_goes_on_where_the_text_stood(kind: str, text: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text * 3, add_special_tokens=False).ids
    assume(ids)
    at = data.draw(st.integers(0, len(ids)))
    whole = show(tokenizer, ids, [1])
    pieces = [piece for output in whole for piece in output.pieces]
    resumed = TextSequence(TextDecoder(tokenizer), request(output=ids[:at]))
    rest = [resumed.feed(Output("s", (token,))) for token in ids[at:]]
    rest.append(resumed.feed(Output("s", finish="length")))
    assert "".join(pieces[:at]) + text_of(rest) == decode(tokenizer, ids)
    assert [token for output in rest for token in output.tokens] == ids[at:]


@settings(max_examples=150, deadline=None)
@given(kinds, texts, stop_strings, st.data())
def test_a_takeover_between_outputs_still_finds_the_stop_string(
    kind: str, text: str, stop: tuple[str, ...], data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    ends = [0]
    for output in show(tokenizer, ids, [1], stop)[:-1]:
        ends.append(ends[-1] + len(output.tokens))
    at = data.draw(st.sampled_from(ends))
    resumed = TextSequence(TextDecoder(tokenizer), request(output=ids[:at], stop=stop))
    shown = decode(tokenizer, ids[:at])
    for token in ids[at:]:
        output = resumed.feed(Output("s", (token,)))
        shown += "".join(output.pieces)
        if output.finish:
            break
    else:
        shown += "".join(resumed.feed(Output("s", finish="length")).pieces)
    assert shown == cut_at_stop(decode(tokenizer, ids), stop)


def test_what_a_token_brings_before_half_a_character_is_shown_though_a_stop_string_follows() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("aü").ids
    assert [len(tokenizer.id_to_token(token) or "") for token in ids] == [2, 1]  # bytes: the first ends inside ü
    sequence = TextSequence(TextDecoder(tokenizer), request(stop=("ü",)))
    outputs = [sequence.feed(Output("s", (token,))) for token in ids]
    assert outputs[-1] == Output("s", (ids[0],), ("a",), finish="stop")


def test_an_emoji_is_shown_with_its_last_byte() -> None:
    tokenizer = tokenizer_of("bytes")
    sequence = TextSequence(TextDecoder(tokenizer), request())
    ids = tokenizer.encode("a😀b").ids
    outputs = [sequence.feed(Output("s", (token,))) for token in ids]
    assert [output.pieces for output in outputs] == [("a",), (), (), (), ("", "", "", "😀"), ("b",)]


@settings(max_examples=60, deadline=None)
@given(kinds, texts, splits, stop_strings)
def test_logprobs_wait_with_their_tokens(kind: str, text: str, sizes: list[int], stop: tuple[str, ...]) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text).ids
    sequence = TextSequence(TextDecoder(tokenizer), request(stop=stop))
    outputs: list[Output] = []
    for chunk in chunks_of(ids, sizes):
        outputs.append(sequence.feed(Output("s", tuple(chunk), logprobs=tuple(TokenLogprobs(-one) for one in chunk))))
        if outputs[-1].finish:
            break
    else:
        outputs.append(sequence.feed(Output("s", finish="length")))
    for output in outputs:
        assert [scored.logprob for scored in output.logprobs] == [-token for token in output.tokens]


def test_half_a_character_at_the_end_is_counted_but_not_shown() -> None:
    tokenizer = tokenizer_of("bytes")
    ids = tokenizer.encode("a😀").ids[:3]
    outputs = show(tokenizer, ids, [1])
    assert text_of(outputs) == "a"
    assert [token for output in outputs for token in output.tokens] == ids


def test_the_token_in_which_a_stop_string_begins_keeps_the_part_before_it() -> None:
    tokenizer = byte_level(vocab_size=400)
    ids = tokenizer.encode("the end").ids
    assert len(ids) < len("the end")  # tokens of several characters
    outputs = show(tokenizer, ids, [1], stop=("he e",))
    assert outputs[-1] == Output("s", (ids[0],), ("t",), finish="stop")


def test_special_tokens_count_and_have_no_text() -> None:
    tokenizer = tokenizer_of("byte_fallback")
    special = tokenizer.get_vocab()[SPECIAL]
    ids = [special] * 30 + tokenizer.encode("the sea", add_special_tokens=False).ids + [special] * 30
    outputs = show(tokenizer, ids, [1])
    assert [token for output in outputs for token in output.tokens] == ids
    assert text_of(outputs) == "the sea"


def test_special_tokens_do_not_swallow_the_space_behind_them() -> None:
    tokenizer = tokenizer_of("byte_fallback")
    special, sea = tokenizer.get_vocab()[SPECIAL], tokenizer.get_vocab()["▁sea"]
    ids = [sea, *[special] * 40, sea]
    assert text_of(show(tokenizer, ids, [1])) == decode(tokenizer, ids) == "sea sea"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_long_text_is_decoded_in_windows(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("the sea 😀😀 the end. 文" * 200, add_special_tokens=False).ids
    longest = 0

    class Counting(TextDecoder):
        def decode(self, ids: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids)

    sequence = TextSequence(Counting(tokenizer), request())
    outputs = [sequence.feed(Output("s", tuple(ids))), sequence.feed(Output("s", finish="length"))]
    assert text_of(outputs) == decode(tokenizer, ids)
    assert longest < 64


def test_a_stop_string_ends_the_sequence_and_its_abort_is_not_told_twice() -> None:
    tokenizer = tokenizer_of("bytes")
    stage = TextStage(tokenizer)
    stage.open(request(stop=("b",)))
    raw = tuple(tokenizer.encode("abc").ids)
    assert stage.feed([Output("s", raw)]) == ([Output("s", raw[:1], ("a",), finish="stop")], ["s"])
    stage.open(request())  # the id may be used again at once
    assert stage.feed([Output("s", finish="cancelled"), Output("s", raw)]) == ([Output("s", raw, tuple("abc"))], [])


def test_a_refused_request_passes_through_unread() -> None:
    stage = TextStage(tokenizer_of("bytes"))
    stage.open(Request("s", (1,), output=(-5,)))
    refusal = Output("s", finish="error", error_code="bad_token", error="no")
    assert stage.feed([refusal]) == ([refusal], [])


@pytest.mark.parametrize("begun", [False, True])
def test_an_id_that_was_aborted_may_be_used_again_at_once(*, begun: bool) -> None:
    stage = TextStage(tokenizer_of("bytes"))
    raw = tuple(tokenizer_of("bytes").encode("abc").ids)
    stage.open(request())
    if begun:
        stage.feed([Output("s", raw)])
    stage.open(request())  # while the other lives
    stage.open(request(stop=("c",)))  # after it was aborted
    refusal, cancelled = Output("s", finish="error", error_code="duplicate_sequence"), Output("s", finish="cancelled")
    again = Output("s", raw[:2], tuple("ab"), finish="stop")
    assert stage.feed([refusal, cancelled, Output("s", raw)]) == ([refusal, cancelled, again], ["s"])
