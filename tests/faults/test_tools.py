"""The tools themselves: a proxy that makes the faults it is told to, and a checker that sees each kind of damage."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from brokers import entries
from brokers.job import Content, Control, Entry, Job, Kind, Lane, State, Usage
from tests.faults.checker import Stream, stream_faults
from tests.faults.proxy import FaultProxy


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that answers with what it is sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=_answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def _answer(connection: socket.socket) -> None:
    with connection:
        try:
            while data := connection.recv(4096):
                connection.sendall(data)
        except OSError:
            pass


@pytest.fixture
def proxy(echo: int) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", echo) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
        assert _echoed(client, b"hello") == b"hello"
        yield client


def _echoed(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return client.recv(4096)


def test_a_delay_holds_back_both_ways_and_keeps_the_order(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.delay(0.1)
    began = time.monotonic()
    client.sendall(b"1")
    client.sendall(b"2")
    received = b""
    while len(received) < 2:
        received += client.recv(1)
    assert received == b"12"
    assert 0.2 <= time.monotonic() - began < 0.5


def test_a_stall_takes_and_gives_nothing_until_it_heals(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.stall()
    client.sendall(b"later")
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)
    proxy.heal()
    client.settimeout(5)
    assert client.recv(5) == b"later"


def test_a_cut_resets_what_is_connected_and_lets_others_in(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        _until_reset(client)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as another:
        assert _echoed(another, b"again") == b"again"


def test_a_truncation_lets_so_many_bytes_through(proxy: FaultProxy, client: socket.socket) -> None:
    before = proxy.carried
    proxy.truncate(7)
    with pytest.raises(ConnectionResetError):
        _talk_until_reset(client)
    assert proxy.carried - before == 7


def test_who_is_refused_is_reset(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.refuse()
    with (
        pytest.raises(ConnectionResetError),
        socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as another,
    ):
        _until_reset(another)
    proxy.heal()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as another:
        assert _echoed(another, b"again") == b"again"


def _until_reset(client: socket.socket) -> None:
    if not client.recv(1):
        raise ConnectionResetError  # the reset may show as an end


def _talk_until_reset(client: socket.socket) -> None:
    while _echoed(client, b"0123456789"):
        pass
    raise ConnectionResetError


# --- the checker ----------------------------------------------------------------------------------------------


def _whole() -> Stream:
    """A stream of two entries without a fault."""
    first, second = _digest("he"), _digest("hello")
    found: list[Entry] = [
        Control(pos=0, n=1, kind="accepted"),
        Content(start=0, pos=2, text="he", token_ids=(1, 2), offsets=(1, 2), digest=first),
        Content(start=2, pos=3, text="llo", token_ids=(3,), offsets=(3,), digest=second),
        _end(pos=3, digest=second),
    ]
    job = Job(
        id="local",
        tenant="acme",
        kind=Kind.TEXT,
        model="scripted",
        lane=Lane.STANDARD,
        home="local",
        place="local",
        state=State.SUCCEEDED,
        created_ms=0,
        deadline_ms=1,
        pos=3,
        usage=Usage(1, 3),
    )
    return Stream(job, found)


def _end(pos: int, digest: str, status: str = "succeeded") -> Control:
    usage = {"prompt_tokens": 1, "completion_tokens": pos}
    return Control(pos=pos, n=1, kind="end", data={"status": status, "digest": digest, "usage": usage})


def _digest(text: str) -> str:
    digest = entries.Digest()
    digest.update(text)
    return digest.hex()


def test_a_whole_stream_has_no_fault() -> None:
    assert stream_faults(_whole()) == []


@pytest.mark.parametrize(
    ("at", "damage", "told"),
    [
        (1, None, "starts at 2 where 0 was"),
        (2, None, "its end counts"),
        (3, None, "0 terminal entries"),
        (2, {"start": 1}, "starts at 1 where 2 was"),
        (2, {"text": "l0o"}, "the digest at 3"),
        (2, {"token_ids": (3, 4)}, "has 2 tokens for 1"),
        (2, {"offsets": (2,)}, "do not cover its text"),
        (3, {"data": _end(3, _digest("other")).data}, "the digest of its end"),
        (3, {"data": _end(4, _digest("hello")).data}, "its end counts"),
        (3, {"data": _end(3, _digest("hello"), "failed").data}, "its end says failed"),
    ],
)
def test_a_damaged_stream_is_told(at: int, damage: dict[str, object] | None, told: str) -> None:
    job, found = _whole()
    if damage is None:
        del found[at]
    else:
        found[at] = msgspec.structs.replace(found[at], **damage)
    assert told in "; ".join(stream_faults(Stream(job, found)))


def test_two_ends_and_what_follows_an_end_are_told() -> None:
    job, found = _whole()
    assert "2 terminal entries" in stream_faults(Stream(job, [*found, found[-1]]))[0]
    assert "its terminal entry is not its last" in stream_faults(Stream(job, [*found, found[0]]))
