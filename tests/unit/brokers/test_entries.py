"""The stream entry's format, and cuts in the middle of one."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from brokers import entries
from brokers.job import Content, Control

pieces = st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=5), min_size=1, max_size=20)


def written(start: int, parts: list[str]) -> Content:
    """What a reader gets of what a writer wrote."""
    ids = list(range(start, start + len(parts)))
    text, packed_ids, offsets, digest = entries.fields(ids, parts, "00")
    raw = {b"p": start, b"t": text, b"i": packed_ids, b"o": offsets, b"h": digest, b"ts": 5}
    sent = {key: value if isinstance(value, bytes) else str(value).encode() for key, value in raw.items()}
    entry = entries.parse(f"{start + len(parts)}-0".encode(), sent)
    assert isinstance(entry, Content)
    return entry


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


def test_a_control_entry_reads_back_whole() -> None:
    raw = {b"k": b"end", b"d": b'{"status":"succeeded"}', b"ts": b"7"}
    assert entries.parse(b"12-3", raw) == Control(pos=12, n=3, kind="end", data={"status": "succeeded"}, ts_ms=7)


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"])), max_size=10))
def test_the_digest_does_not_show_chunk_borders(parts: list[str]) -> None:
    digest = entries.Digest()
    for part in parts:
        digest.update(part)
    assert digest.hex() == hashlib.sha256("".join(parts).encode()).hexdigest()[:16]
