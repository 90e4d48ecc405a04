"""Frames: nothing in the data can end one, or forge another."""

from __future__ import annotations

import json

import httpx
from httpx_sse import EventSource
from hypothesis import given
from hypothesis import strategies as st

from producers import sse

_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]) | st.sampled_from("\r\n\x85\u2028\u2029"))


@given(texts=st.lists(_text, max_size=5))
def test_any_text_comes_back_as_it_was(texts: list[str]) -> None:
    stream = sse.RETRY
    for pos, text in enumerate(texts, 1):
        stream += sse.HEARTBEAT + sse.event("token", {"pos": pos, "text": text}, cursor=pos)
    headers = {"Content-Type": "text/event-stream"}
    events = list(EventSource(httpx.Response(200, headers=headers, content=stream)).iter_sse())
    assert [json.loads(event.data)["text"] for event in events] == texts
    assert [event.id for event in events] == [str(pos) for pos in range(1, len(texts) + 1)]
    assert all(event.event == "token" for event in events)


def test_only_an_event_with_a_cursor_carries_an_id() -> None:
    assert b"id:" not in sse.event("progress", {"pos": 3})
    assert sse.event("end", {}, cursor=0).startswith(b"id: 0\n")
