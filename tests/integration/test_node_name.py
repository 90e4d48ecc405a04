"""A worker's name is its own."""

from __future__ import annotations

import socket
import threading

import pytest
from celery import Celery

from brokers.errors import ConfigurationError
from brokers.settings import Settings
from workers import node_name

NAME = "twin.local@here"


@pytest.fixture
def app(settings: Settings) -> Celery:
    return Celery(broker=settings.here.amqp.get_secret_value())


def test_a_name_that_nobody_has_is_free_at_once(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    node_name.require_free(app, NAME)
    assert not caplog.records


def test_a_name_in_use_is_refused_and_what_to_do_is_said(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_name, "_LEFT_BEHIND_S", 0.5)
    with app.connection_for_read() as twin:
        control = app.control.mailbox.Node(NAME, channel=twin.default_channel)
        control.listen()
        with pytest.raises(ConfigurationError, match=NAME) as refused:
            node_name.require_free(app, NAME)
    assert "--name" in refused.value.advice


def test_a_connection_that_was_left_behind_is_waited_for(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    twin = app.connection_for_read()
    app.control.mailbox.Node(NAME, channel=twin.default_channel).listen()
    closing = threading.Timer(1.0, twin.close)
    closing.start()
    node_name.require_free(app, NAME)
    closing.join()
    assert "is taken" in caplog.text


def test_a_broker_that_is_away_is_not_waited_for(closed_port: int) -> None:
    node_name.require_free(Celery(broker=f"amqp://127.0.0.1:{closed_port}"), NAME)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
    return port
