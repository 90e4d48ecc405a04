"""A child process: ended as a group, found again by its pid file, never confused with a stranger."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from compose.servers import Process
from compose.servers.process import end_leftover, running, started

_PARENT = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
_STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    made: list[Process] = []

    def make(code: str) -> Process:
        process = Process(
            "child",
            [sys.executable, "-c", code],
            env=dict(os.environ),
            log=tmp_path / "log",
            pid_file=tmp_path / "pid",
        )
        made.append(process)
        return process

    yield make
    for process in made:
        process.kill()


def _wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within ten seconds"
        time.sleep(0.01)


def _is_up(process: Process) -> bool:
    return "up" in process.tail()


def test_a_kill_takes_the_grandchildren_along(make: Callable[[str], Process]) -> None:
    process = make(_PARENT)
    process.spawn()
    _wait(lambda: _is_up(process))
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.kill()
    _, left = psutil.wait_procs(family, timeout=5)
    assert not left


def test_who_does_not_stop_when_asked_is_ended_after_the_grace(make: Callable[[str], Process]) -> None:
    process = make(_STUBBORN)
    process.spawn()
    _wait(lambda: _is_up(process))
    process.stop(grace_s=0.2)
    assert process.exit_code == -9


def test_the_exit_code_tells_how_it_ended(make: Callable[[str], Process]) -> None:
    process = make("import sys; sys.exit(3)")
    assert process.exit_code is None
    process.spawn()
    _wait(lambda: not process.alive)
    assert process.exit_code == 3


def test_the_log_goes_on_over_a_restart(make: Callable[[str], Process]) -> None:
    process = make("print('hello')")
    for _ in range(2):
        process.spawn()
        _wait(lambda: not process.alive)
    assert process.tail() == "hello\nhello"


def test_a_leftover_is_found_and_ended(make: Callable[[str], Process], tmp_path: Path) -> None:
    process = make(_PARENT)
    process.spawn()
    assert running(tmp_path / "pid") is not None
    assert end_leftover(tmp_path / "pid")
    _wait(lambda: not process.alive)
    assert not (tmp_path / "pid").exists()


def test_a_stranger_with_a_leftovers_pid_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        (tmp_path / "pid").write_text(f"{stranger.pid} {started(os.getpid())}\n")
        assert not end_leftover(tmp_path / "pid")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_nothing_is_found_where_no_pid_file_is(tmp_path: Path) -> None:
    assert running(tmp_path / "none") is None
    assert not end_leftover(tmp_path / "none")
