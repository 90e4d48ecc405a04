"""One process of the platform itself, with a probe that tells when it works."""

from __future__ import annotations

from collections.abc import Callable

from compose.servers.process import Process
from compose.servers.server import Server


class Service(Server):
    def __init__(
        self,
        process: Process,
        probe: Callable[[], bool],
        *,
        start_timeout_s: float,
        stop_grace_s: float,
        stop_means: str = "end",
    ) -> None:
        self.process = process
        self.start_timeout_s = start_timeout_s
        self.stop_grace_s = stop_grace_s
        self.stop_means = stop_means
        self._probe = probe

    def ready(self) -> bool:
        return self._probe()
