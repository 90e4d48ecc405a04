"""Several servers that start and end as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from compose.servers.errors import StartFailed
from compose.servers.server import Server

_POLL_S = 0.05


class Group:
    """A context manager over servers. Subclasses name their `members`, and say in `form` how they find each other."""

    start_timeout_s = 30.0

    @property
    def members(self) -> Sequence[Server]:
        raise NotImplementedError

    def form(self) -> None:
        """Make them one, once each of them is ready."""
        raise NotImplementedError

    def start(self) -> None:
        """Main thread only, see Process."""
        for member in self.members:
            member.launch()
        for member in self.members:
            member.wait_ready()
        self.form()

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def stop(self) -> None:
        for member in self.members:
            member.process.ask_to_stop()
        for member in self.members:
            member.stop()

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Raises StartFailed when it does not come true in time."""
        deadline = time.monotonic() + self.start_timeout_s
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(member.process.tail(5) for member in self.members)
                raise StartFailed(f"{what}: not so within {self.start_timeout_s:.0f} s:\n{logs}")
            time.sleep(_POLL_S)

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
