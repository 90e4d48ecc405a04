"""The stream entry's format, and cuts in the middle of one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from brokers import entries
from brokers.job import Content, Control, Scored

pieces = st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=5), min_size=1, max_size=20)


def read_back(start: int, pos: int, fields: Sequence[str | bytes]) -> Content:
    """What a reader gets of what a writer wrote."""
    digest, *named = fields
    raw = {"p": str(start), "h": digest, "ts": "5", **dict(zip(named[::2], named[1::2], strict=True))}
    sent = {str(name).encode(): value if isinstance(value, bytes) else value.encode() for name, value in raw.items()}
    entry = entries.parse(f"{pos}-0".encode(), sent)
    assert isinstance(entry, Content)
    return entry


def written(start: int, parts: list[str]) -> Content:
    ids = list(range(start, start + len(parts)))
    return read_back(start, start + len(parts), entries.fields(ids, parts, "00"))


@given(st.integers(0, 2**31), pieces)
def test_a_content_entry_reads_back_whole(start: int, parts: list[str]) -> None:
    entry = written(start, parts)
    assert entry.text == "".join(parts)
    assert (entry.start, entry.pos) == (start, start + len(parts))
    assert entry.token_ids == tuple(range(start, start + len(parts)))


@given(st.integers(0, 1000), pieces, st.data())
def test_a_cut_leaves_exactly_the_pieces_beyond_it(start: int, parts: list[str], data: st.DataObject) -> None:
    after = data.draw(st.integers(start, start + len(parts) - 1))
    rest = entries.cut(written(start, parts), after)
    kept = parts[after - start :]
    assert rest.text == "".join(kept)
    assert (rest.start, rest.pos, len(rest.token_ids)) == (after, start + len(parts), len(kept))
    again = entries.cut(rest, rest.pos - 1)
    assert again.text == parts[-1]


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=20), st.data())
def test_vectors_read_back_one_by_one_and_are_cut_between_two(vectors: list[bytes], data: st.DataObject) -> None:
    entry = read_back(7, 7 + len(vectors), entries.vector_fields(vectors))
    assert (entry.text, entry.token_ids, entries.split(entry)) == ("", (), vectors)
    after = data.draw(st.integers(7, 6 + len(vectors)))
    rest = entries.cut(entry, after)
    assert (rest.start, rest.pos, entries.split(rest)) == (after, entry.pos, vectors[after - 7 :])


_logprobs = st.floats(max_value=0, width=32)
_scored = st.integers(0, 5).flatmap(
    lambda top: st.lists(
        st.tuples(_logprobs, st.lists(st.tuples(st.integers(0, 2**32 - 1), _logprobs), min_size=top, max_size=top)),
        min_size=1,
        max_size=12,
    )
)


@given(_scored, st.data())
def test_logprobs_read_back_with_their_tokens_and_are_cut_with_them(
    scored: list[tuple[float, list[tuple[int, float]]]], data: st.DataObject
) -> None:
    count = len(scored)
    packed = [entries.packed_logprobs(logprob, top) for logprob, top in scored]
    entry = read_back(7, 7 + count, entries.fields(range(count), ["x"] * count, "00", packed))
    expected = [Scored(logprob, tuple(top)) for logprob, top in scored]
    assert entries.scored(entry) == expected
    assert entries.split_logprobs(entry) == packed
    after = data.draw(st.integers(7, 6 + count))
    assert entries.scored(entries.cut(entry, after)) == expected[after - 7 :]


def test_an_entry_has_the_logprobs_of_all_its_tokens_or_of_none() -> None:
    one = entries.packed_logprobs(-1.0, [])
    assert entries.scored(read_back(0, 2, entries.fields([1, 2], ["a", "b"], "00", [b"", one]))) == []
    assert entries.scored(written(0, ["a", "b"])) == []


def test_a_control_entry_reads_back_whole() -> None:
    raw = {b"k": b"end", b"d": b'{"status":"succeeded"}', b"ts": b"7"}
    assert entries.parse(b"12-3", raw) == Control(pos=12, n=3, kind="end", data={"status": "succeeded"}, ts_ms=7)


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"])), max_size=10))
def test_the_digest_does_not_show_chunk_borders(parts: list[str]) -> None:
    digest = entries.Digest()
    for part in parts:
        digest.update(part)
    assert digest.hex() == hashlib.sha256("".join(parts).encode()).hexdigest()[:16]
