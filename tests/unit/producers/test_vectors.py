"""Vectors in JSON mean the same float32 as on the wire."""

from __future__ import annotations

import base64
from array import array

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from producers.vectors import Encoding, encode, encoded

rows = st.lists(st.lists(st.floats(width=32, min_value=-1, max_value=1), min_size=3, max_size=3), max_size=8)


@given(rows)
def test_floats_are_short_and_mean_the_same(numbers: list[list[float]]) -> None:
    vectors = [array("f", row).tobytes() for row in numbers]
    written = msgspec.json.encode(encoded(vectors, Encoding.FLOAT))
    read = msgspec.json.decode(written, type=list[list[float]])
    assert [array("f", row) for row in read] == [array("f", row) for row in numbers]


@given(rows)
def test_base64_is_what_is_on_the_wire(numbers: list[list[float]]) -> None:
    vectors = [array("f", row).tobytes() for row in numbers]
    assert [base64.b64decode(text) for text in encoded(vectors, Encoding.BASE64)] == vectors  # type: ignore[arg-type]


async def test_many_are_worded_in_a_thread_alike() -> None:
    vectors = [array("f", [n / 7] * 100).tobytes() for n in range(400)]
    assert await encode(vectors, Encoding.FLOAT) == encoded(vectors, Encoding.FLOAT)
    assert len(msgspec.json.encode(encoded(vectors[1:2], Encoding.FLOAT))) < 1300
