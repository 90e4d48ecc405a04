"""The supervisor, over real processes: order, failure, revival, and an end that leaves nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose.servers import Process, Service
from compose.servers.errors import StartFailed
from compose.supervisor.supervisor import Step, Supervisor, Tier


class Recorder:
    """Keeps what it is told, and stops the supervisor at a chosen moment."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.revived = threading.Event()
        self._dead: set[str] = set()

    def starting(self, name: str) -> None:
        self.told.append(("starting", name))
        if name in self._dead:
            self.revived.set()

    def ready(self, name: str, seconds: float) -> None:
        self.told.append(("ready", name))

    def doing(self, step: str) -> None:
        self.told.append(("doing", step))

    def waiting(self, name: str, stop_means: str) -> None:
        self.told.append(("waiting", name))

    def died(self, name: str, code: int | None, pause_s: float) -> None:
        self.told.append(("died", name))
        self._dead.add(name)

    def stopping(self) -> None:
        self.told.append(("stopping", ""))


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _service(folder: Path, name: str, code: str, *, start_timeout_s: float = 10) -> Service:
    marker = folder / f"{name}.up"
    process = Process(
        name,
        [sys.executable, "-c", code, str(marker)],
        env=dict(os.environ),
        log=folder / f"{name}.log",
        pid_file=folder / f"{name}.pid",
    )
    return Service(process, marker.exists, start_timeout_s=start_timeout_s, stop_grace_s=5)


_RUNS = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(60)"
_FAILS = "print('no such broker'); raise SystemExit(4)"
_NEVER_READY = "import time; time.sleep(60)"


def test_a_tier_starts_once_the_one_before_it_is_ready(tmp_path: Path) -> None:
    recorder = Recorder()
    first, second = _service(tmp_path, "first", _RUNS), _service(tmp_path, "second", _RUNS)
    tiers = [Tier([first], then=Step("then", lambda: None)), Tier([second])]
    supervisor = Supervisor(tiers, recorder)
    supervisor.run(supervisor.request_stop)
    assert recorder.told == [
        ("starting", "first"),
        ("ready", "first"),
        ("doing", "then"),
        ("starting", "second"),
        ("ready", "second"),
        ("stopping", ""),
    ]


def test_after_the_end_nothing_runs(tmp_path: Path) -> None:
    services = [_service(tmp_path, name, _RUNS) for name in ("a", "b", "c")]
    supervisor = Supervisor([Tier(services[:2]), Tier(services[2:])], Recorder())
    supervisor.run(supervisor.request_stop)
    assert not any(service.process.alive for service in services)
    assert not list(tmp_path.glob("*.pid"))


def test_a_part_that_fails_is_named_with_the_end_of_its_log_and_all_is_stopped(tmp_path: Path) -> None:
    good, bad = _service(tmp_path, "good", _RUNS), _service(tmp_path, "bad", _FAILS)
    with pytest.raises(StartFailed, match=r"bad ended with code 4:\nno such broker"):
        Supervisor([Tier([good]), Tier([bad])], Recorder()).run(lambda: None)
    assert not good.process.alive


def test_a_part_that_is_never_ready_fails_at_its_deadline(tmp_path: Path) -> None:
    slow = _service(tmp_path, "slow", _NEVER_READY, start_timeout_s=0.5)
    with pytest.raises(StartFailed, match="slow was not ready within"):
        Supervisor([Tier([slow])], Recorder()).run(lambda: None)
    assert not slow.process.alive


def test_a_signal_during_the_start_ends_it_cleanly(tmp_path: Path) -> None:
    slow = _service(tmp_path, "slow", _NEVER_READY)
    killer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    killer.start()
    Supervisor([Tier([slow])], Recorder()).run(lambda: pytest.fail("it never came up"))
    assert not slow.process.alive


_STUBBORN = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), sys.exit()));" + _RUNS


def test_a_step_that_hangs_fails_at_its_deadline(tmp_path: Path) -> None:
    service = _service(tmp_path, "first", _RUNS)
    step = Step("preparing", lambda: time.sleep(30), timeout_s=0.3)
    with pytest.raises(StartFailed, match="preparing took longer"):
        Supervisor([Tier([service], then=step)], Recorder()).run(lambda: None)
    assert not service.process.alive


def test_a_signal_ends_a_step_that_hangs(tmp_path: Path) -> None:
    service = _service(tmp_path, "first", _RUNS)

    def hang() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

    began = time.monotonic()
    Supervisor([Tier([service], then=Step("preparing", hang))], Recorder()).run(lambda: pytest.fail("it came up"))
    assert time.monotonic() - began < 10
    assert not service.process.alive


def test_an_error_of_a_step_is_the_starts(tmp_path: Path) -> None:
    def fail() -> None:
        raise StartFailed("no queue")

    with pytest.raises(StartFailed, match="no queue"):
        Supervisor([Tier([], then=Step("preparing", fail))], Recorder()).run(lambda: None)


def test_who_takes_long_to_stop_is_named(tmp_path: Path) -> None:
    recorder = Recorder()
    supervisor = Supervisor(
        [Tier([_service(tmp_path, "slow", _STUBBORN), _service(tmp_path, "fast", _RUNS)])], recorder
    )
    supervisor.run(supervisor.request_stop)
    assert recorder.told[-2:] == [("stopping", ""), ("waiting", "slow")]


def test_a_part_that_dies_is_started_again(tmp_path: Path) -> None:
    recorder = Recorder()
    service = _service(tmp_path, "worker", _RUNS)
    supervisor = Supervisor([Tier([service])], recorder)

    def kill_and_wait() -> None:
        os.kill(service.process.pid, signal.SIGKILL)
        recorder.revived.wait(10)
        time.sleep(0.1)  # the new process is launched right after it is told
        supervisor.request_stop()

    watcher = threading.Thread(target=kill_and_wait)
    supervisor.run(watcher.start)
    watcher.join()
    assert ("died", "worker") in recorder.told
    assert recorder.revived.is_set()
    assert not service.process.alive
