"""The parent's side of an engine in a process of its own.

A fresh interpreter is spawned, never forked: CUDA and torch's threads do not survive a fork. Each life of the child
has two threads here. The host's thread spawns it, reads its reports and buries it; the sender writes commands, so
that submit() never waits for an engine in the middle of a step. The spawning thread must live as long as the child,
because Linux sends the parent-death signal when the *thread* that spawned it ends, and a Celery thread may.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import IO, NamedTuple

import msgspec

from workers.engine import wire
from workers.engine.protocol import Ask, Capabilities, Output, Stats
from workers.engine.wire import EngineOptions

__all__ = ["EngineGone", "EngineHost", "EngineOptions", "EngineStartError"]

log = logging.getLogger(__name__)

_LAST_WORDS = 12  # lines of the child's own output kept for the message about its end
_RECEIVE = 1 << 18
_BURIAL_S = 2.0
_ROOT = Path(__file__).resolve().parents[2]


class EngineStartError(RuntimeError):
    """The engine's process did not become ready; the message ends with its last words."""


class EngineGone(RuntimeError):
    """The engine's process is not running."""


class EngineHost:
    """One engine, restarted by calling start() again. All methods may be called from any thread.

    `on_outputs` gets each step's released outputs on the host's thread, and should return soon: the engine does not
    run far ahead of it. `on_begin` gets the sequences that a step is about to work on for the first time. `on_exit`
    is told there why a ready child ended, unless stop() asked for it. None of them may call start() or stop().
    """

    def __init__(
        self,
        folder: Path,
        options: EngineOptions,
        on_outputs: Callable[[list[Output]], None],
        on_exit: Callable[[str], None],
        on_begin: Callable[[list[str]], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._options = options
        self._told = _Told(on_outputs, on_exit, on_begin)
        self._lock = threading.Lock()  # of start and stop
        self._life: _Life | None = None

    def start(self, timeout: float = 300) -> Capabilities:
        """Spawn, load, warm up; returns when the engine is ready. Raises EngineStartError."""
        with self._lock:
            if self.alive:
                raise EngineStartError("the engine is already running")
            self._life = _Life(self._folder, self._options, self._told)
            return self._life.begin(timeout)

    def submit(self, request: Ask) -> None:
        """Hand a sequence over; never waits for the engine.

        Raises EngineGone, and ValueError or TypeError for a request that cannot be sent (a seed beyond 64 bits, say).
        """
        if not self._tell(wire.Submit(request)):
            raise EngineGone("the engine's process is not running")

    def abort(self, seq: str) -> None:
        self._tell(wire.Abort(seq))

    def pause(self, seq: str) -> None:
        self._tell(wire.Pause(seq))

    def resume(self, seq: str) -> None:
        self._tell(wire.Resume(seq))

    @property
    def capabilities(self) -> Capabilities | None:
        """Of the child that runs, or ran last; None before the first was ready."""
        return self._life.capabilities if self._life else None

    def stats(self) -> Stats | None:
        """The last ones; the child pushes them twice a second."""
        return self._life.stats if self._life else None

    @property
    def silent_s(self) -> float:
        """Seconds since the child last said anything, or since what works behind it did; it reports twice a second,
        between steps."""
        if self._life is None:
            return 0.0
        stats = self._life.stats
        return max(time.monotonic() - self._life.heard, stats.step_age_s if stats else 0.0)

    def kill(self) -> None:
        """End a child that hangs; `on_exit` follows."""
        if self._life:
            self._life.kill()

    @property
    def alive(self) -> bool:
        return self._life is not None and self._life.alive

    @property
    def pid(self) -> int | None:
        return self._life.pid if self._life and self._life.alive else None

    def stop(self, timeout: float = 5) -> None:
        """Ask the child to end, and kill it when it has not within `timeout` seconds. May be called again."""
        with self._lock:
            if self._life is not None:
                self._life.end(timeout)

    def _tell(self, command: wire.Command) -> bool:
        life = self._life
        return life is not None and life.tell(command)


class _Told(NamedTuple):
    """Who hears of a child."""

    outputs: Callable[[list[Output]], None]
    exit: Callable[[str], None]
    begin: Callable[[list[str]], None]


class _Life:
    """One child process, from spawn to burial."""

    def __init__(
        self,
        folder: Path,
        options: EngineOptions,
        told: _Told,
    ) -> None:
        self.stats: Stats | None = None
        self.capabilities: Capabilities | None = None  # once it is ready
        self.heard = time.monotonic()  # a report
        self._folder = folder
        self._options = options
        self._told = told
        self._process: subprocess.Popen[str] | None = None
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._settled = threading.Event()  # ready, or over before it was
        self._asked = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="engine-host", daemon=True)

    @property
    def alive(self) -> bool:
        return self.capabilities is not None and not self._over.is_set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def begin(self, timeout: float) -> Capabilities:
        self._thread.start()
        if not self._settled.wait(timeout):
            self.end(timeout=0)
            raise EngineStartError(f"the engine was not ready within {timeout:g} s{self._last_words()}")
        if self.capabilities is None:
            self._thread.join()
            raise EngineStartError(f"the engine ended before it was ready{self._last_words()}")
        return self.capabilities

    def tell(self, command: wire.Command) -> bool:
        if not self.alive:
            return False
        self._frames.put(wire.checked_frame(command))
        return True

    def end(self, timeout: float) -> None:
        self._asked = True
        self._frames.put(wire.frame(wire.Stop()))
        if not self._over.wait(timeout) and self._process is not None:
            self._process.kill()
        self._thread.join()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _live(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = self._process = self._spawn(theirs)
            if self._asked:  # start() gave up before the process was there to be killed
                process.kill()
            sender, listener = (
                threading.Thread(target=self._send, args=(ours,), name="engine-sender", daemon=True),
                threading.Thread(target=self._listen, args=(process.stdout,), name="engine-output", daemon=True),
            )
            sender.start()
            listener.start()
            self._read(ours)
            self._bury(process, listener)
            self._frames.put(None)
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            sender.join()
        except OSError as error:
            self._words.append(f"it could not be spawned: {error}")
            return
        finally:
            self._over.set()
            self._settled.set()
            ours.close()
        if self.capabilities is not None and not self._asked:
            self._told.exit(f"the engine's process ended with code {process.returncode}{self._last_words()}")

    def _spawn(self, channel: socket.socket) -> subprocess.Popen[str]:
        threads = self._options.threads or max(1, wire.usable_cores() - 1)
        options = msgspec.json.encode(msgspec.structs.replace(self._options, threads=threads)).decode()
        fd = channel.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", "workers.engine.child", str(self._folder), options, str(fd), str(os.getpid())],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_environment(threads),
            start_new_session=True,  # a signal to the worker's group is for the worker, which drains its engine
        )

    def _read(self, channel: socket.socket) -> None:
        frames = wire.Frames()
        while data := _receive(channel):
            self.heard = time.monotonic()
            for report in wire.reports(frames.feed(data)):
                self._hear(report)

    def _hear(self, report: wire.Report) -> None:
        match report:
            case wire.Outputs(outputs):
                self._deliver(outputs)
            case wire.StatsReport(stats):
                self.stats = stats
            case wire.Begun(seqs):
                self._told.begin(seqs)
            case wire.Ready(capabilities):
                self.capabilities = capabilities
                self._settled.set()

    def _deliver(self, outputs: list[Output]) -> None:
        try:
            self._told.outputs(outputs)
        except Exception:  # one bad consumer must not end the stream of all others
            log.exception("a consumer of engine outputs failed")

    def _bury(self, process: subprocess.Popen[str], listener: threading.Thread) -> None:
        """The channel is at its end: so is the child, or it is about to be, and what it has started itself."""
        try:
            process.wait(timeout=_BURIAL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        listener.join(_BURIAL_S)  # whoever lives of its group still holds its output
        if listener.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            listener.join(_BURIAL_S)

    def _send(self, channel: socket.socket) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                channel.sendall(frame)
            except OSError:
                return  # the reader sees the end too, and buries

    def _listen(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._words.append(line.rstrip())
                log.info("engine: %s", line.rstrip())

    def _last_words(self) -> str:
        return ": " + "\n".join(self._words) if self._words else ""


def _receive(channel: socket.socket) -> bytes:
    try:
        return channel.recv(_RECEIVE)
    except OSError:
        return b""


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # glibc gives freed megabytes back to the system, and each step would fault the same ones in again: keeping
        # them takes the sampling of 16 rows from 10 to 3 ms. (32 MB is the most glibc accepts here.)
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
        # Weights on pages of 2 MB, where the kernel gives them on request: a step reads all of them. Products took
        # 0.84 to 0.88 of the time within one process; between processes on a busy machine it did not always show.
        "GLIBC_TUNABLES": ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"))),
        "TOKENIZERS_PARALLELISM": "false",
    }
