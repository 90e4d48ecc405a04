"""What RabbitMQ and Valkey have in common: launch, wait until ready, stop, kill, and start again on the same data."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from compose.servers.errors import StartFailed
from compose.servers.process import Process

_POLL_S = 0.05


class Server:
    """A private server as a context manager. Subclasses set `process` and answer `ready`."""

    process: Process
    start_timeout_s = 60.0
    stop_grace_s = 20.0
    stop_means = "end"  # what we wait for it to do then

    @property
    def name(self) -> str:
        return self.process.name

    def launch(self) -> None:
        """Start the process and return at once. Main thread only, see Process."""
        self.process.spawn()

    def ready(self) -> bool:
        """Whether a client can log in now; answers within a second."""
        raise NotImplementedError

    def wait_ready(self) -> None:
        """Raises StartFailed with the last lines of the log."""
        deadline = time.monotonic() + self.start_timeout_s
        while not self.ready():
            self.check_start(deadline)
            time.sleep(_POLL_S)

    def check_start(self, deadline: float) -> None:
        """Raises StartFailed when it ended, or when `deadline` (monotonic) passed before it was ready."""
        if not self.process.alive:
            raise StartFailed(f"{self.name} ended with code {self.process.exit_code}:\n{self.process.tail()}")
        if time.monotonic() > deadline:
            raise StartFailed(f"{self.name} was not ready within {self.start_timeout_s:.0f} s:\n{self.process.tail()}")

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def stop(self) -> None:
        self.process.stop(self.stop_grace_s)

    def kill(self) -> None:
        """End it as a power cut would; `start` brings it back on the same ports and data."""
        self.process.kill()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
