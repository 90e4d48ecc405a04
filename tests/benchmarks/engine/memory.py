"""Keeps the machine from running out of memory, whatever a contender does."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import psutil

_LOOK_S = 0.5
_SPARE = 1 << 30  # bytes that stay free for everybody else


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def peak_bytes(pid: int) -> int:
    """The sum of each process's greatest resident size; memory that two of them share counts twice."""
    return sum(_high_water(process.pid) for process in tree(pid))


def available_bytes() -> int:
    return int(psutil.virtual_memory().available)


def _high_water(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


class Guard:
    """Ends a tree of processes when it holds more than `limit` bytes, or when the machine runs short."""

    def __init__(self, pid: int, limit: int) -> None:
        self.reason: str | None = None  # why it was ended
        self._pid = pid
        self._limit = limit
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S) and self.reason is None:
            held = sum(_resident(process) for process in tree(self._pid))
            if held > self._limit:
                self.reason = f"it took more than {self._limit / 2**30:.0f} GiB"
            elif available_bytes() < _SPARE:
                self.reason = "the machine ran short of memory"
        if self.reason is not None:
            end(self._pid)


def end(pid: int) -> None:
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _resident(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        return int(process.memory_info().rss)
    return 0
