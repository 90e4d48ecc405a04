"""The command's HTTP client: what it does when an answer is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from compose.cli import client as client_module
from compose.cli.client import Client, Unreachable
from compose.cli.target import Target


class Server(ThreadingHTTPServer):
    """Closes its first `lost` connections without an answer."""

    def __init__(self) -> None:
        self.lost = 0
        self.keys: list[str | None] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.keys.append(self.headers["Idempotency-Key"])
        if len(self.server.keys) <= self.server.lost:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(202)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(client_module, "_AGAIN_S", (0.0, 0.0))
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _client(server: Server) -> Client:
    return Client(Target(f"http://127.0.0.1:{server.server_port}", None))


def test_a_request_whose_answer_was_lost_is_sent_again_under_the_same_key(server: Server) -> None:
    server.lost = 2
    with _client(server) as client:
        assert client.post_once("/v1/jobs", {}) == {}
        assert client.post_once("/v1/jobs", {}) == {}
    first, second, third, other = server.keys
    assert first == second == third != other


def test_it_is_not_sent_for_ever(server: Server) -> None:
    server.lost = 9
    with _client(server) as client, pytest.raises(Unreachable):
        client.post_once("/v1/jobs", {})
    assert len(server.keys) == 3


def test_a_server_that_is_not_there_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_AGAIN_S", (60.0, 60.0))
    with Client(Target("http://127.0.0.1:9", None)) as client, pytest.raises(Unreachable):
        client.post_once("/v1/jobs", {})
