"""What lies where under .lingbot, and who may write there now."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from brokers.errors import LingbotError
from compose.servers import PortBook, process, secret

DEFAULT = Path(".lingbot")


class AlreadyRunning(LingbotError):
    """A platform already runs from this folder."""

    code = "already_running"
    hint = "`lingbot down` stops it; `lingbot status` shows it."


class StateFolder:
    """All state of one platform. Its files are readable by their owner alone."""

    def __init__(self, root: Path) -> None:
        self.root = secret.private_folder(root)
        self.config = self.root / "lingbot.toml"
        self.ports = self.root / "ports.json"
        self.dev_key = self.root / "dev.key"
        self.models = self.root / "models"
        self.logs = self.root / "logs"
        self.run = self.root / "run"
        self._pid_file = self.run / "supervisor.pid"
        self._ready = self.run / "ready"

    def port(self, name: str) -> int | None:
        """Where a part listens, or listened when it last ran."""
        return PortBook(self.ports).known(name)

    @property
    def flower_password(self) -> Path:
        return self.root / "flower.password"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def pid_file(self, name: str) -> Path:
        return self.run / f"{name}.pid"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the one supervisor of this folder. Raises AlreadyRunning."""
        self.run.mkdir(exist_ok=True)
        with (self.root / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = self.supervisor()
                named = f" (process {holder.pid})" if holder else ""
                raise AlreadyRunning(f"a platform already runs from {self.root}{named}") from None
            process.write_own_pid(self._pid_file)
            try:
                yield
            finally:
                self._ready.unlink(missing_ok=True)
                self._pid_file.unlink(missing_ok=True)

    def supervisor(self) -> psutil.Process | None:
        """The process that runs the platform of this folder."""
        return process.running(self._pid_file)

    def mark_ready(self) -> None:
        self._ready.write_text(f"{os.getpid()}\n")

    def is_ready(self, supervisor_pid: int) -> bool:
        """Whether everything this supervisor runs has come up. A killed one leaves its mark behind, hence the pid."""
        try:
            return self._ready.read_text() == f"{supervisor_pid}\n"
        except FileNotFoundError:
            return False

    def end_leftovers(self) -> int:
        """End what a killed supervisor may have left; how many processes ran."""
        pid_files = [*self.run.glob("*.pid"), *self.root.glob("*/*pid")]
        return sum(process.end_leftover(path) for path in set(pid_files) - {self._pid_file})
