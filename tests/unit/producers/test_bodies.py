"""Bodies: refused in words that name the field, within the size, whatever their bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request

from producers.bodies import decode, read
from producers.openai.requests import ChatRequest
from producers.problems import Problem
from producers.schemas import JobRequest

_JOB = msgspec.json.Decoder(JobRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)


def _request(*messages: dict[str, Any], headers: dict[str, str] | None = None) -> Request:
    coming = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(coming)

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive)


def _part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_parts_are_joined_in_order() -> None:
    assert await read(_request(_part(b"ab", more=True), _part(b"", more=True), _part(b"cd")), 4) == b"abcd"


async def test_a_body_is_refused_at_the_part_that_passes_the_limit() -> None:
    with pytest.raises(Problem) as caught:  # the third part is never asked for
        await read(_request(_part(b"abc", more=True), _part(b"de", more=True)), 4)
    assert caught.value.code == "body_too_large"


async def test_a_declared_length_is_refused_before_a_byte_is_read() -> None:
    with pytest.raises(Problem) as caught:
        await read(_request(headers={"content-length": "5"}), 4)
    assert caught.value.status == 413


async def test_a_client_that_leaves_in_mid_body_is_no_error_of_ours() -> None:
    with pytest.raises(ClientDisconnect):
        await read(_request(_part(b"a", more=True), {"type": "http.disconnect"}), 4)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b'{"model": "m", "zip": 1}', "unknown_field", "zip"),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": "", "zip": 1}]}',
            "unknown_field",
            "messages[0].zip",
        ),
        (b'{"prompt": "m"}', "missing_field", "model"),
        (b'{"model": "m", "messages": [{"content": ""}]}', "missing_field", "messages[0].role"),
        (b'{"model": "m", "temperature": -0.1}', "invalid_parameter", "temperature"),
        (b'{"model": "m", "stop": ["a", ""]}', "invalid_parameter", "stop[1]"),
        (b"7", "invalid_parameter", None),
    ],
)
def test_the_field_at_fault_is_named(body: bytes, code: str, param: str | None) -> None:
    with pytest.raises(Problem) as caught:
        decode(_JOB, body)
    assert (caught.value.code, caught.value.param) == (code, param)


@given(st.binary(max_size=200))
def test_no_bytes_get_past_the_decoder_but_as_a_problem(body: bytes) -> None:
    decoders: list[msgspec.json.Decoder[Any]] = [_JOB, _CHAT]
    for decoder in decoders:
        with pytest.raises(Problem) as caught:
            decode(decoder, body)
        assert caught.value.status == 400


_json = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(field=st.sampled_from(JobRequest.__struct_fields__), value=_json)
def test_any_value_of_any_field_is_taken_or_refused_with_its_name(field: str, value: Any) -> None:
    body = msgspec.json.encode({"model": "m", "prompt": "p", field: value})
    problem = _problem(body)
    if problem is not None:
        assert problem.status == 400
        assert problem.param is not None
        assert problem.param.startswith(field)


def _problem(body: bytes) -> Problem | None:
    try:
        decode(_JOB, body)
    except Problem as problem:
        return problem
    return None
