"""Starts tiers of servers one after the other, watches them, and stops them in reverse."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import NamedTuple, Protocol

from compose.servers import Server
from compose.servers.errors import StartFailed

_POLL_S = 0.1
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_THEN_S = 60.0
_QUIET_STOP_S = 1.0  # who takes longer to stop is named
_STEADY_S = 60.0  # who ran this long starts with the first pause again


class Step(NamedTuple):
    """Something done in between, in another thread: it starts no process."""

    name: str  # "preparing queues"
    act: Callable[[], None]
    timeout_s: float = _THEN_S


class Tier(NamedTuple):
    """Servers that start and stop together, and what is done once all of them are ready."""

    servers: Sequence[Server]
    then: Step | None = None


class Report(Protocol):
    """Is told what happens."""

    def starting(self, name: str) -> None: ...
    def ready(self, name: str, seconds: float) -> None: ...
    def doing(self, step: str) -> None: ...
    def died(self, name: str, code: int | None, pause_s: float) -> None: ...
    def stopping(self) -> None: ...
    def waiting(self, name: str, stop_means: str) -> None: ...


class Interrupted(Exception):
    """Asked to stop before everything had started."""


class _Record:
    """When a server was started, and how long to wait before the next try."""

    def __init__(self) -> None:
        self.started = 0.0
        self.pause_s = _FIRST_PAUSE_S
        self.again_at: float | None = None
        self.reviving = False  # it died, was started again, and is not ready yet


class Supervisor:
    """Use from the main thread: it takes over SIGINT, SIGTERM and SIGHUP, and its children hang on its thread."""

    def __init__(self, tiers: Sequence[Tier], report: Report) -> None:
        self._tiers = tiers
        self._report = report
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._records: dict[Server, _Record] = {}

    def run(self, when_up: Callable[[], None]) -> None:
        """Start everything, call `when_up`, keep it up until a signal, and stop it. Raises StartFailed."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            self._start()
            when_up()
            self._watch()
        except Interrupted:
            pass
        finally:
            self._shut_down()

    def request_stop(self) -> None:
        self._stop.set()

    def _on_signal(self, *_: int | FrameType | None) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _start(self) -> None:
        for tier in self._tiers:
            for server in tier.servers:
                self._launch(server)
            self._await(tier.servers)
            if tier.then:
                self._do(tier.then)

    def _launch(self, server: Server) -> None:
        record = self._records.setdefault(server, _Record())
        record.started = time.monotonic()
        record.again_at = None
        self._report.starting(server.name)
        server.launch()

    def _await(self, servers: Sequence[Server]) -> None:
        waiting = list(servers)
        while waiting:
            for server in list(waiting):
                started = self._records[server].started
                if server.ready():
                    waiting.remove(server)
                    self._report.ready(server.name, time.monotonic() - started)
                else:
                    server.check_start(started + server.start_timeout_s)
            if self._stop.wait(_POLL_S if waiting else 0):
                raise Interrupted

    def _do(self, step: Step) -> None:
        """Run it beside the main thread, which goes on hearing signals and the clock whatever it hangs on."""
        self._report.doing(step.name)
        done: Future[None] = Future()
        threading.Thread(target=_run, args=(step.act, done), name=step.name, daemon=True).start()
        deadline = time.monotonic() + step.timeout_s
        while not done.done():
            if self._stop.wait(_POLL_S):
                raise Interrupted
            if time.monotonic() > deadline:
                raise StartFailed(f"{step.name} took longer than {step.timeout_s:.0f} s")
        done.result()

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            for server, record in self._records.items():
                if not server.process.alive:
                    self._revive(server, record)
                elif record.reviving and server.ready():
                    record.reviving = False
                    self._report.ready(server.name, time.monotonic() - record.started)

    def _revive(self, server: Server, record: _Record) -> None:
        now = time.monotonic()
        if record.again_at is None:
            if now - record.started > _STEADY_S:
                record.pause_s = _FIRST_PAUSE_S
            record.again_at = now + record.pause_s
            self._report.died(server.name, server.process.exit_code, record.pause_s)
            record.pause_s = min(record.pause_s * 2, _LONGEST_PAUSE_S)
        elif now >= record.again_at:
            self._launch(server)
            record.reviving = True

    def _shut_down(self) -> None:
        if self._records:
            self._report.stopping()
        for tier in reversed(self._tiers):
            started = [server for server in tier.servers if server in self._records]
            for server in started:
                server.process.ask_to_stop()
            for server in started:
                self._end(server)

    def _end(self, server: Server) -> None:
        """Give it its grace; a second signal from the user ends the patience with everybody."""
        started, told = time.monotonic(), False
        while server.process.alive and not self._hurry.wait(0.02):
            waited_s = time.monotonic() - started
            if waited_s > server.stop_grace_s:
                break
            if waited_s > _QUIET_STOP_S and not told:
                told = True
                self._report.waiting(server.name, server.stop_means)
        server.kill()


def _run(act: Callable[[], None], done: Future[None]) -> None:
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - it is raised in the main thread
        done.set_exception(error)
    else:
        done.set_result(None)
