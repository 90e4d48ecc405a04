"""Real servers and real processes for the tests, started by the suite itself on free ports.

`rabbitmq`, `valkey` and `settings` are for integration tests; `platform` adds an API process, a worker on the
scripted model and a reconciler for acceptance tests. A missing server skips on a laptop and fails where CI is set.
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from brokers import settings as settings_module
from brokers.settings import Region, Settings
from compose import config
from compose.servers import PortBook, RabbitMQ, Valkey
from compose.servers.errors import ServerMissing
from tests.platform import APART_MODEL, SCRIPTED_MODEL, Platform

REGION = "local"

ServerT = TypeVar("ServerT", RabbitMQ, Valkey)


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder everything of this session lies under."""
    return tmp_path_factory.mktemp("lingbot")


@pytest.fixture(scope="session")
def ports() -> PortBook:
    return PortBook()


@pytest.fixture(scope="session")
def rabbitmq(state: Path, ports: PortBook) -> Iterator[RabbitMQ]:
    """A private RabbitMQ. A test that kills it starts it again."""
    server = _installed(lambda: RabbitMQ(state / "rabbitmq", regions=[REGION], ports=ports))
    try:
        server.start()
        yield server
    finally:
        server.kill()  # its data goes with the folder


@pytest.fixture(scope="session")
def valkey(state: Path, ports: PortBook) -> Iterator[Valkey]:
    """A private Valkey. A test that kills it starts it again."""
    server = _installed(lambda: Valkey(state / "valkey", ports=ports))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def models_dir(state: Path) -> Path:
    """An origin that holds the scripted model."""
    from workers.weights.scripted import create_scripted_model

    folder = state / "models"
    for name in (SCRIPTED_MODEL, APART_MODEL):
        create_scripted_model(folder, name, {"directives": True})
    return folder


@pytest.fixture(scope="session")
def settings(state: Path, models_dir: Path, rabbitmq: RabbitMQ, valkey: Valkey, ports: PortBook) -> Iterator[Settings]:
    """A platform of one region; `settings.load()` gives the same, here and in every process a test starts."""
    region = Region.model_validate(
        {"amqp": rabbitmq.url(REGION), "redis": valkey.url, "management": rabbitmq.management_url}
    )
    wanted = {
        "region": REGION,
        "regions": {REGION: region.model_dump()},
        "models_dir": models_dir,
        "runtime_dir": state / "run",
        "seal_keys": {"test": base64.b64encode(secrets.token_bytes(32)).decode()},
        "port": ports.take("api"),
        "webhook_allow_loopback": True,  # the receiver is on this machine
        "webhook_retries_s": [0.1, 0.2, 0.3],
    }
    path = state / "lingbot.toml"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("LINGBOT_")]:
            patch.delenv(name)
        path.write_text(config.to_toml(wanted))
        patch.setenv("LINGBOT_CONFIG", str(path))
        settings_module.load.cache_clear()
        yield settings_module.load()
    settings_module.load.cache_clear()


@pytest.fixture(scope="session")
def platform(state: Path, settings: Settings) -> Iterator[Platform]:
    """The whole platform as processes of its own, ready to take jobs."""
    running = Platform(state, settings)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def _installed(make: Callable[[], ServerT]) -> ServerT:
    try:
        return make()
    except ServerMissing as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{missing.message}. {missing.advice}")
