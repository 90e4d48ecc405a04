"""How each process of the platform is started: one command line a part, for the supervisor and for the tests."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from brokers import names
from brokers.job import Lane
from brokers.settings import Settings

FLOWER_USER = "lingbot"

_PYTHON = (sys.executable, "-m")


def api() -> list[str]:
    return [*_PYTHON, "producers"]


def worker(
    settings: Settings, models: Iterable[str], *, name: str = "worker", lanes: Sequence[Lane] = tuple(Lane)
) -> list[str]:
    """A plain Celery worker on the queues of these models and lanes, in this region."""
    queues = ",".join(names.queue(settings.region, model, lane) for model in models for lane in lanes)
    node = f"{name}.{settings.region}@{socket.gethostname()}"
    return [*_PYTHON, "celery", "-A", "workers.app", "worker", "-Q", queues, "-n", node, "-l", settings.log_level]


def reconciler() -> list[str]:
    return [*_PYTHON, "brokers.reconciler"]


def flower() -> list[str]:
    """Its options, secrets among them, are in its environment: a command line is for everybody to read."""
    return [*_PYTHON, "celery", "-A", "workers.app", "flower"]


def flower_environment(settings: Settings, *, port: int, password: str) -> dict[str, str]:
    options = {
        "ADDRESS": "127.0.0.1",
        "PORT": str(port),
        "BASIC_AUTH": f"{FLOWER_USER}:{password}",
        "MAX_TASKS": "10000",
        "PURGE_OFFLINE_WORKERS": "60",
        "INSPECT_TIMEOUT": "2000",
    }
    if settings.here.management:
        options["BROKER_API"] = f"{settings.here.management.get_secret_value()}/api/"
    return {f"FLOWER_{name}": value for name, value in options.items()}


def environment(config: Path, **settings: object) -> dict[str, str]:
    """A child's environment: ours, the file its settings are in, and the settings that are its own."""
    own = {f"LINGBOT_{name.upper()}": str(value) for name, value in settings.items()}
    return dict(os.environ) | {"LINGBOT_CONFIG": str(config), "PYTHONUNBUFFERED": "1"} | own
