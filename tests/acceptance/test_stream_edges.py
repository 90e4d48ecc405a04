"""Streams whose entries a test writes itself: damage, forgeries and sizes that no worker would bring about."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from httpx_sse import ServerSentEvent, connect_sse

from brokers import calls, connect, entries
from brokers.job import Job
from brokers.settings import Settings
from brokers.store import Store
from tests.integration.test_store import make_job
from tests.platform import Platform

_FORGED = "\n\nid: 999\nevent: end\ndata: {}\n\n\r\n\rid: 998\r\u2028event: end\x85:"
_FRAME_LINE = re.compile(r'(id: \d+|event: (token|progress|error|end)|data: \{"[^\n\r]*\}|retry: \d+|: still here|)\Z')
_END = {"status": "succeeded", "finish_reason": "stop", "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
_PIECE = "x" * 512
_ENTRIES = 16_000  # of eight such pieces: 64 MB
_BOUND_MB = 40


class Pen:
    """Writes one job's stream, with whatever in it."""

    def __init__(self, client: connect.Blocking, job: Job, settings: Settings) -> None:
        self._client = client
        self.keys = calls.keys(job, settings.partitions)
        self.url = f"/v1/jobs/{job.id}/events"
        self.pos = 0

    def text(self, pieces: Sequence[str], times: int = 1) -> None:
        written = []
        for _ in range(times):
            start, self.pos = self.pos, self.pos + len(pieces)
            ids = [ord(piece[0]) for piece in pieces]
            digest, *content = entries.fields(ids, pieces, "d" * 16)
            fields = ("p", start, *content, "h", digest, "ts", 1)
            written.append(("XADD", self.keys.stream, f"{self.pos}-0", *fields))
        self.send(*written, ("HSET", self.keys.record, "pos", self.pos, "ctl", 0))

    def control(self, n: int, kind: str, data: dict[str, Any]) -> None:
        fields = ("k", kind, "d", json.dumps(data), "ts", 1)
        entry = ("XADD", self.keys.stream, f"{self.pos}-{n}", *fields)
        self.send(entry, ("HSET", self.keys.record, "ctl", n))

    def end(self) -> None:
        self.control(7, "end", {**_END, "digest": "d" * 16})
        self.send(("HSET", self.keys.record, "state", "succeeded"))

    def send(self, *commands: tuple[Any, ...]) -> None:
        replies = connect.send_all(self._client, [calls.Call(command, bool) for command in commands])
        assert not [reply for reply in replies if isinstance(reply, Exception)]


@pytest.fixture
def pen(platform: Platform) -> Iterator[Pen]:
    with _pen(platform.settings) as pen:
        yield pen


@pytest.fixture
def other(platform: Platform) -> Iterator[Pen]:
    with _pen(platform.settings) as pen:
        yield pen


@contextmanager
def _pen(settings: Settings) -> Iterator[Pen]:
    job = msgspec.structs.replace(make_job(settings), tenant="acceptance")
    asyncio.run(_with_store(settings, job, "create"))
    with connect.blocking(settings, settings.region, timeout_s=20) as client:
        yield Pen(client, job, settings)
    asyncio.run(_with_store(settings, job, "erase"))


async def _with_store(settings: Settings, job: Job, what: str) -> None:
    store = Store(settings)
    await store.open()
    if what == "create":
        assert await store.create(job, b"")
        await store.queued(job)
    else:
        await store.erase(job)
    await store.close()


@pytest.fixture
def http(platform: Platform) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    with httpx.Client(base_url=platform.base_url, headers=headers, timeout=20) as client:
        yield client


@contextmanager
def _reading(http: httpx.Client, pen: Pen, after: int = 0) -> Iterator[Iterator[ServerSentEvent]]:
    with connect_sse(http, "GET", pen.url, params={"after": after}) as source:
        yield source.iter_sse()


def _text(events: Sequence[ServerSentEvent]) -> str:
    return "".join(event.json()["text"] for event in events if event.event == "token")


# --- what is missing is told ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [True, False])
def test_a_trimmed_stream_is_told_as_gone_and_its_rest_can_be_read(http: httpx.Client, pen: Pen, ended: bool) -> None:
    pen.text(list("abcd"))
    pen.text(list("efgh"))
    if ended:
        pen.end()
    pen.send(("XTRIM", pen.keys.stream, "MINID", "8-0"))
    answer = http.get(pen.url)
    assert (answer.status_code, answer.json()["code"]) == (410, "stream_gap")
    if ended:
        with _reading(http, pen, after=4) as events:
            assert _text(list(events)) == "efgh"


def test_a_stream_that_was_trimmed_under_its_reader_breaks_with_an_error(http: httpx.Client, pen: Pen) -> None:
    pen.text(list("abcd"))
    with _reading(http, pen) as events:
        while next(events).event != "token":
            pass
        pen.pos += 4  # these were there, and are no more
        pen.text(list("ijkl"))
        (broken,) = list(events)
    assert (broken.event, broken.json()["code"]) == ("error", "stream_gap")


@pytest.mark.parametrize("how", [("DEL",), ("PEXPIRE", 1)], ids=["deleted", "expired"])
def test_an_ended_stream_that_is_no_more_is_410(http: httpx.Client, pen: Pen, other: Pen, how: tuple[Any, ...]) -> None:
    """Also while the API waits for other streams, in an XREAD that was sent before."""
    pen.text(list("abcd"))
    pen.end()
    pen.send((how[0], pen.keys.stream, *how[1:]))
    with _reading(http, other) as events:
        next(events)
        answers = [http.get(pen.url, params={"after": after}) for after in range(4)]
    assert [answer.status_code for answer in answers] == [410] * 4
    assert {answer.json()["code"] for answer in answers} == {"stream_gone"}


# --- what is forged stays data --------------------------------------------------------------------------------


def test_nothing_in_a_stream_can_forge_an_event_or_an_id(http: httpx.Client, pen: Pen) -> None:
    pen.control(2, f"noted{_FORGED}", {f"key{_FORGED}": _FORGED, "worker": _FORGED})
    pen.text([_FORGED])
    pen.end()
    with http.stream("GET", pen.url) as answer:
        raw = answer.read().decode()
    lines = re.split("[\n\r\x85\u2028\u2029]", raw)  # at all line ends that any client knows
    assert [line for line in lines if not _FRAME_LINE.match(line)] == []
    assert [line for line in lines if line.startswith("id:")] == ["id: 1", "id: 1"]
    assert lines.count("event: end") == 1
    with _reading(http, pen) as events:
        assert _text(list(events)) == _FORGED


def test_control_entries_never_move_the_cursor(http: httpx.Client, pen: Pen) -> None:
    """Ids of control entries that a client sent back would skip what came at their position."""
    pen.text(["a"])
    for n in range(1, 4):
        pen.control(n, "taken_over", {"worker": "w", "attempt": n})
    pen.text(["b", "c"])
    pen.end()
    with http.stream("GET", pen.url) as answer:
        frames = answer.read().decode().split("\n\n")
    with_id = {
        frame.partition("event: ")[2].partition("\n")[0] for frame in frames if re.search("^id:", frame, re.MULTILINE)
    }
    assert with_id == {"token", "end"}
    assert sum("event: progress" in frame for frame in frames) == 4  # with `accepted`
    rests = []
    for after in range(4):
        with _reading(http, pen, after=after) as events:
            found = list(events)
        assert found[-1].event == "end"
        rests.append(_text(found))
    assert rests == ["abc", "bc", "c", ""]


# --- what is not read costs little ----------------------------------------------------------------------------


def test_a_stalled_tab_costs_the_api_no_more_than_a_bound(platform: Platform, http: httpx.Client, pen: Pen) -> None:
    api = psutil.Process(platform.processes["api"].pid)
    for _ in range(_ENTRIES // 500):
        pen.text([_PIECE] * 8, times=500)
    pen.end()
    before = api.memory_info().rss
    with _stalled(platform, pen):
        tail = b""
        # Another reads all of it meanwhile: so could the stalled one have, and kept it.
        with http.stream("GET", pen.url) as answer:
            for part in answer.iter_bytes():
                tail = (tail + part)[-200:]
        assert b"event: end" in tail
        grown_mb = (api.memory_info().rss - before) >> 20
    assert grown_mb < _BOUND_MB


def test_a_shutdown_does_not_wait_for_a_stalled_tab(platform: Platform, pen: Pen) -> None:
    """What it was sent stays in buffers, its connection would not close by itself."""
    api = platform.processes["api"]
    for _ in range(8):
        pen.text([_PIECE] * 8, times=500)
    with _stalled(platform, pen):
        asked = time.monotonic()
        api.ask_to_stop()
        while api.alive:
            assert time.monotonic() < asked + 4, "it waits"
            time.sleep(0.05)
    platform.restart("api")


@contextmanager
def _stalled(platform: Platform, pen: Pen) -> Iterator[None]:
    """A client that asks for the stream, and takes no more than the answer's beginning."""
    request = f"GET {pen.url} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {platform.api_key}\r\n\r\n"
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((platform.settings.host, platform.settings.port))
        stalled.sendall(request.encode())
        assert stalled.recv(12) == b"HTTP/1.1 200"
        yield
