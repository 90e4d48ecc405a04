"""The event stream: whole, resumable at every position, unbuffered, and let go when its reader goes."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from httpx_sse import ServerSentEvent, connect_sse

from tests.platform import Platform

_LONG = "a long one !slow@5"


@pytest.fixture(scope="module")
def http(platform: Platform) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    with httpx.Client(base_url=platform.base_url, headers=headers, timeout=20) as client:
        yield client


def _submit(http: httpx.Client, platform: Platform, prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/jobs", json={"model": platform.model, "prompt": prompt, **fields})
    assert response.status_code == 202, response.text
    return response.json()  # type: ignore[no-any-return]


def _events(http: httpx.Client, job: dict[str, Any], **request: Any) -> Iterator[ServerSentEvent]:
    with connect_sse(http, "GET", job["urls"]["events"], **request) as source:
        assert source.response.headers["Cache-Control"] == "no-store"
        assert source.response.headers["X-Accel-Buffering"] == "no"
        yield from source.iter_sse()


def _text(events: list[ServerSentEvent]) -> str:
    return "".join(event.json()["text"] for event in events if event.event == "token")


def _open_streams(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("lingbot_open_streams")).split()[1])


def _until(wanted: Any, timeout_s: float = 5) -> None:
    deadline = time.monotonic() + timeout_s
    while not wanted():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stream_is_the_whole_text_and_ends_once(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, "stream !slow@1", max_tokens=200)
    events = list(_events(http, job))
    tokens = [event for event in events if event.event == "token"]
    positions = [event.json()["pos"] for event in tokens]
    assert positions == sorted(set(positions))
    assert [int(event.id) for event in tokens] == positions
    assert [event.event for event in events].count("end") == 1
    end = events[-1].json()
    assert (end["status"], end["finish_reason"], end["pos"]) == ("succeeded", "length", 200)
    shown = http.get(job["urls"]["self"]).json()
    assert shown["result"]["text"] == _text(events)
    assert end["usage"] == shown["usage"]


def test_only_what_is_durable_moves_the_cursor(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, max_tokens=8)
    last = ""
    with connect_sse(http, "GET", job["urls"]["events"]) as source:
        for line in source.response.iter_lines():
            if line.startswith("id:"):
                assert line[3:].strip().isdigit()
                last = line
            if line.startswith("event: progress"):
                assert last == ""  # no id came before it, and it has none
            if not line:
                last = ""


def test_a_resume_from_every_position_gives_the_rest_exactly(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, max_tokens=48, seed=5)
    whole = _text(list(_events(http, job)))
    heads = {0: ""}
    for event in _events(http, job):
        if event.event == "token":
            heads[event.json()["pos"]] = heads[max(heads)] + event.json()["text"]
    for pos in range(49):
        rest = list(_events(http, job, params={"after": pos}))
        assert rest[-1].event == "end"
        assert whole.endswith(_text(rest))
        if pos in heads:
            assert heads[pos] + _text(rest) == whole


def test_a_reader_that_drops_again_and_again_sees_the_text_once(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, "drops !slow@2", max_tokens=300)
    text, last, ended = "", "", False
    while not ended:
        headers = {"Last-Event-ID": last} if last else {}
        for n, event in enumerate(_events(http, job, headers=headers)):
            last = event.id or last
            ended = event.event == "end"
            if event.event == "token":
                text += event.json()["text"]
            if n > 5:
                break  # the connection is cut here
    assert text == http.get(job["urls"]["self"]).json()["result"]["text"]


def test_last_event_id_wins_over_after(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, max_tokens=16)
    list(_events(http, job))
    events = list(_events(http, job, params={"after": 0}, headers={"Last-Event-ID": "16"}))
    assert [event.event for event in events] == ["end"]


@pytest.mark.parametrize("cursor", ["-1", "x", "1.5", "1-0", "9" * 30, "٣", "1 OR 1"])
def test_a_cursor_that_is_none_is_refused(platform: Platform, http: httpx.Client, cursor: str) -> None:
    job = _submit(http, platform, max_tokens=4)
    by_query = http.get(job["urls"]["events"], params={"after": cursor})
    by_header = http.get(job["urls"]["events"], headers=[(b"Last-Event-ID", cursor.encode())])
    for response in (by_query, by_header):
        assert (response.status_code, response.json()["code"]) == (400, "bad_cursor")


def test_a_cursor_past_the_end_is_told_where_the_stream_stands(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, max_tokens=4)
    list(_events(http, job))
    response = http.get(job["urls"]["events"], params={"after": 5})
    assert (response.status_code, response.json()["code"]) == (400, "bad_cursor")
    assert "position 4" in response.json()["detail"]


def test_many_readers_of_one_stream_see_the_same(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, "many !slow@2", max_tokens=200)
    texts: list[str] = []
    readers = [threading.Thread(target=lambda: texts.append(_text(list(_events(http, job))))) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert texts == [http.get(job["urls"]["self"]).json()["result"]["text"]] * 8


def test_text_that_looks_like_a_frame_stays_data(platform: Platform, http: httpx.Client) -> None:
    """The scripted text has line ends in it; as JSON they cannot end a frame."""
    job = _submit(http, platform, max_tokens=800)
    text = _text(list(_events(http, job)))
    assert "\n" in text
    assert text == http.get(job["urls"]["self"]).json()["result"]["text"]


def test_a_failed_job_tells_its_error_before_the_end(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, "please !raise@9", max_tokens=24)
    *_, error, end = _events(http, job)
    assert error.event == "error"
    assert error.json()["code"]
    assert (end.event, end.json()["status"]) == ("end", "failed")


def test_a_cancel_ends_the_stream_of_whoever_reads(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, _LONG, max_tokens=4000)
    events = _events(http, job)
    next(event for event in events if event.event == "token")
    http.post(job["urls"]["cancel"])
    *_, end = events
    assert end.json()["status"] == "cancelled"


def test_what_is_written_arrives_at_once(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, "paced !slow@40", max_tokens=20)
    arrived = [time.monotonic() for event in _events(http, job) if event.event == "token"]
    assert len(arrived) >= 5
    assert arrived[-1] - arrived[0] > 0.3  # not all in one piece at the end


def test_a_reader_that_goes_away_frees_its_tail_and_not_the_job(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, _LONG, max_tokens=300)
    before = _open_streams(http)
    events = _events(http, job)
    next(events)
    assert _open_streams(http) == before + 1
    events.close()  # type: ignore[attr-defined]
    _until(lambda: _open_streams(http) == before)
    assert list(_events(http, job))[-1].json()["status"] == "succeeded"


def test_a_reader_that_does_not_read_costs_no_memory_and_holds_nobody(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, max_tokens=4000)
    path = f"{job['urls']['events']}?after=0"
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {platform.api_key}\r\n\r\n"
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((platform.settings.host, platform.settings.port))
        stalled.sendall(request.encode())
        assert list(_events(http, job))[-1].json()["status"] == "succeeded"


def test_a_shutdown_ends_open_streams_at_once_and_they_resume(platform: Platform) -> None:
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    with httpx.Client(base_url=platform.base_url, headers=headers, timeout=20) as http:
        job = _submit(http, platform, "bye !slow@10", max_tokens=400)
        events = _events(http, job)
        seen = [next(event for event in events if event.event == "token")]
        api = platform.processes["api"]
        asked = time.monotonic()
        api.ask_to_stop()
        seen += list(events)
        assert time.monotonic() - asked < 2
        assert seen[-1].event != "end"
        _until(lambda: not api.alive, timeout_s=4)
        platform.restart("api")
        last = next(event.id for event in reversed(seen) if event.id)
        seen += list(_events(http, job, headers={"Last-Event-ID": last}))
        assert seen[-1].json()["status"] == "succeeded"
        text = _text(seen)
        first = seen[0].json()
        whole = http.get(job["urls"]["self"]).json()["result"]["text"]
        assert whole.endswith(text)
        assert first["pos"] <= 8


def test_a_shutdown_does_not_wait_for_a_stream_that_says_nothing(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, max_tokens=4, delay=60)
    api = platform.processes["api"]
    with connect_sse(http, "GET", job["urls"]["events"]) as source:
        reading = source.response.iter_raw()  # collected, it would close the connection
        next(reading)
        api.ask_to_stop()
        _until(lambda: not api.alive, timeout_s=4)
    platform.restart("api")


def test_events_are_json_on_one_line(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, max_tokens=64)
    with http.stream("GET", job["urls"]["events"]) as response:
        for frame in response.read().decode().split("\n\n"):
            for line in frame.splitlines():
                if line.startswith("data:"):
                    json.loads(line[5:])
