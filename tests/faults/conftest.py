"""Servers for the fault tests, the two sizes of each fault, and the table they make.

The short form of each fault runs with `make test`, in seconds; the long form, marked `faults`, with `make faults`,
with the numbers that the platform promises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compose.servers.errors import ServerMissing
from tests.faults import report
from tests.faults.rig import Servers, servers

Tell = Callable[[str, str], None]
_REAL_MODELS = Path(".lingbot/models")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-write", type=Path, help="write the table of faults into this file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(report.Collector(), "faults-report")


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--faults-write", default=None)
    collector = session.config.pluginmanager.get_plugin("faults-report")
    if path and isinstance(collector, report.Collector):
        path.write_text(report.page(collector.rows))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """RabbitMQ and Valkey of the fault tests' own: nobody else minds when they die."""
    try:
        with servers(tmp_path_factory.mktemp("faults"), _REAL_MODELS.resolve()) as running:
            yield running
    except ServerMissing as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{missing.message}. {missing.hint}")


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Tell:
    """Say the row of this test: which fault, and what was seen."""

    def told(fault: str, figures: str) -> None:
        record_property("fault", fault)
        record_property("figures", figures)

    return told
