"""Ports are free when given, and the same again after a restart."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose.servers import PortBook
from compose.servers.ports import is_free


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_somebody_listens_on_is_not_free(taken: int) -> None:
    assert not is_free(taken)


def test_the_next_free_port_stands_in_for_a_taken_one(taken: int) -> None:
    assert taken < PortBook().take("api", preferred=taken) < taken + 100


def test_two_names_never_share_a_port() -> None:
    book = PortBook()
    assert book.take("api", preferred=28_000) != book.take("flower", preferred=28_000)


def test_a_name_keeps_its_port_while_its_server_listens() -> None:
    book = PortBook()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", book.take("api")))
        listener.listen()
        assert book.take("api") == listener.getsockname()[1]


def test_a_restart_finds_the_same_ports(tmp_path: Path) -> None:
    first = PortBook(tmp_path / "ports.json")
    ports = {name: first.take(name) for name in ("amqp", "redis")}
    first.save()
    first.close()
    second = PortBook(tmp_path / "ports.json")
    assert {name: second.take(name) for name in ports} == ports


def test_a_port_that_was_taken_meanwhile_is_given_up(tmp_path: Path, taken: int) -> None:
    (tmp_path / "ports.json").write_text(f'{{"api": {taken}}}')
    assert PortBook(tmp_path / "ports.json").take("api") != taken


def test_names_of_an_earlier_run_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text('{"api-old": 28123}')
    book = PortBook(tmp_path / "ports.json")
    book.take("api")
    book.forget_others()
    book.save()
    assert "api-old" not in (tmp_path / "ports.json").read_text()


def test_a_damaged_book_costs_new_ports_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text("{")
    assert PortBook(tmp_path / "ports.json").take("api")


def test_two_platforms_that_start_at_once_get_different_ports() -> None:
    first, second = PortBook(), PortBook()  # neither listens yet
    assert first.take("api", 8000) != second.take("api", 8000)
