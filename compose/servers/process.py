"""One child process: leashed to us, in a group of its own, with a log file and a pid file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_LONG_LOG_BYTES = 20 << 20
_LEASH = str(Path(__file__).with_name("leash.py"))
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Process:
    """A command that can be started again and again.

    Start it from the main thread only: the kernel counts the end of the *thread* that forked as the parent's death.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        pid_file: Path,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.env = dict(env)
        self.log = log
        self._pid_file = pid_file
        self._cwd = cwd
        self._popen: subprocess.Popen[bytes] | None = None
        self._asked = False

    @property
    def pid(self) -> int:
        """Raises RuntimeError before the first spawn."""
        if self._popen is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs and before it ran; negative when a signal ended it."""
        return self._popen.poll() if self._popen else None

    def spawn(self) -> None:
        """Start it now; what a killed predecessor left running is ended first."""
        end_leftover(self._pid_file)
        self._asked = False
        for path in (self.log, self._pid_file):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._turn_log()
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", _LEASH, str(os.getpid()), *self.argv],
                env=self.env,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us alone, and the group can be ended as one
            )
        self._pid_file.write_text(f"{self._popen.pid} {started(self._popen.pid)}\n")

    def _turn_log(self) -> None:
        """Set a long log aside; the one before it goes."""
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > _LONG_LOG_BYTES:
                self.log.replace(self.log.with_name(self.log.name + ".1"))

    def ask_to_stop(self) -> None:
        """Send SIGTERM, once: for some a second one means at once. To the leader alone, which ends its own children."""
        if self.alive and not self._asked:
            self._asked = True
            os.kill(self.pid, signal.SIGTERM)

    def stop(self, grace_s: float = 10.0) -> None:
        """Ask it to end, wait, then end whatever is left of its group."""
        if self._popen is None:
            return
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """End the whole group with -9."""
        if self._popen is None:
            return
        _kill_group(self._popen.pid)
        self._popen.wait()
        self._pid_file.unlink(missing_ok=True)

    def tail(self, lines: int = 15) -> str:
        """The last lines of its log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - 16_384))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""


def end_leftover(pid_file: Path, *, wait_s: float = 5.0) -> bool:
    """End the group a pid file names if it still runs, and remove the file. True when something ran.

    The start time beside the pid tells a leftover from a stranger that was given the same pid.
    """
    leftover = running(pid_file)
    if leftover is not None:
        _kill_group(leftover.pid)
        with contextlib.suppress(psutil.TimeoutExpired):
            leftover.wait(wait_s)
    pid_file.unlink(missing_ok=True)
    return leftover is not None


def running(pid_file: Path) -> psutil.Process | None:
    """The process a pid file names, if it is the one that wrote it and still runs."""
    try:
        pid, noted = pid_file.read_text().split()
        process = psutil.Process(int(pid))
        same = started(process.pid) == noted and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, psutil.Error):
        return None
    return process if same else None


def started(pid: int) -> str:
    """When a process was started, as no clock tells it that may be set: which boot, and ticks since then."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]  # the name before it may hold spaces
    return f"{_BOOT_ID.read_text().strip()}/{ticks}"


def write_own_pid(pid_file: Path) -> None:
    """Name this process in a pid file, the way `running` reads it."""
    pid_file.parent.mkdir(parents=True, exist_ok=True)
    pid_file.write_text(f"{os.getpid()} {started(os.getpid())}\n")


def wait_until_gone(process: psutil.Process, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
