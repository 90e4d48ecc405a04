"""A platform of real processes for acceptance and fault tests: API, one worker on the scripted model, reconciler."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from brokers import names, topology
from brokers.job import Lane
from brokers.models import Registry
from brokers.settings import Settings
from compose import commands, keys, probes
from compose.servers import Process

SCRIPTED_MODEL = "scripted"
APART_MODEL = "separate"
"""Scripted too, and served by no worker but those that a test starts itself: the platform outlives its test module."""
_READY_S = 45.0


class Platform:
    """Each process can be killed with -9, stopped, and started again by its name: "api", "worker", "reconciler"."""

    def __init__(
        self, state: Path, settings: Settings, model: str = SCRIPTED_MODEL, worker_name: str = "worker"
    ) -> None:
        self.settings = settings
        self.model = model
        self.base_url = f"http://{settings.host}:{settings.port}"
        self._state = state
        self.processes = {
            "api": self._process("api", commands.api()),
            "worker": self._process("worker", commands.worker(settings, [model], name=worker_name)),
            "reconciler": self._process("reconciler", commands.reconciler()),
        }
        self._ready: dict[str, Callable[[], bool]] = {
            "api": lambda: probes.api_ready(self.base_url),
            "worker": lambda: probes.consumed(settings, names.queue(settings.region, model, Lane.STANDARD)),
            "reconciler": lambda: probes.has_leader(settings),
        }

    def start(self) -> None:
        """Declare the queues, start everything, wait until all of it is ready, and make an API key."""
        topology.declare(self.settings, [model.card.name for model in Registry(self.settings.models_dir).all()])
        for process in self.processes.values():
            process.spawn()
        for name in self.processes:
            self.wait_ready(name)
        self.api_key = self.new_key("acceptance", {"submit", "read"})
        self.admin_key = self.new_key("acceptance", {"submit", "read", "admin"})

    def stop(self) -> None:
        for name in ("api", "worker", "reconciler"):
            self.processes[name].stop(grace_s=5)

    def kill(self, name: str) -> None:
        """End a process and its children with -9."""
        self.processes[name].kill()

    def restart(self, name: str) -> None:
        """Start a process again, stopping it first if it runs; returns when it is ready."""
        self.processes[name].stop(grace_s=10)
        self.processes[name].spawn()
        self.wait_ready(name)

    def wait_ready(self, name: str) -> None:
        process, ready = self.processes[name], self._ready[name]
        deadline = time.monotonic() + _READY_S
        while not ready():
            if not process.alive or time.monotonic() > deadline:
                raise AssertionError(f"{name} is not ready (exit code {process.exit_code}):\n{process.tail(40)}")
            time.sleep(0.05)

    def new_key(self, tenant: str, scopes: set[str]) -> str:
        return keys.create(self.settings, tenant, scopes, "tests")

    def _process(self, name: str, argv: list[str]) -> Process:
        return Process(
            name,
            argv,
            env=commands.environment(self._state / "lingbot.toml"),
            log=self._state / "logs" / f"{name}.log",
            pid_file=self._state / "run" / f"{name}.pid",
        )
