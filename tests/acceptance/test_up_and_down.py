"""`lingbot up`: the whole platform from nothing, its data over a restart, and not one process left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from compose.servers import RabbitMQ, Valkey
from workers.weights.scripted import create_scripted_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Home:
    """A folder with a platform of its own."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / ".lingbot"
        self._folder = folder
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith("LINGBOT_")}

    def lingbot(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "compose.cli.main", *arguments]
        return subprocess.run(
            command, cwd=self._folder, env=self._environment, text=True, capture_output=True, timeout=120, check=False
        )

    def processes(self) -> list[psutil.Process]:
        """Every process that was started for this folder, by its command line or its environment."""
        return [process for process in psutil.process_iter() if self._belongs(process)]

    def supervisor(self) -> psutil.Process:
        return psutil.Process(int((self.state / "run" / "supervisor.pid").read_text().split()[0]))

    def _belongs(self, process: psutil.Process) -> bool:
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            return False
        return process.pid != os.getpid() and any(str(self.state) in word for word in words)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, rabbitmq: RabbitMQ, valkey: Valkey) -> Iterator[Home]:
    """It starts beside the servers of the other tests, and collides with nothing."""
    home = Home(tmp_path_factory.mktemp("home"))
    create_scripted_model(home.state / "models", "scripted")
    yield home
    home.lingbot("down")
    for process in home.processes():
        process.kill()


def _gone(home: Home) -> list[psutil.Process]:
    """What is still there after ten seconds."""
    deadline = time.monotonic() + 10
    while (left := home.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_it_starts_answers_and_comes_back_with_its_data(home: Home) -> None:
    up = home.lingbot("up", "--detach")
    assert up.returncode == 0, up.stderr
    for word in ("API", "Flower", "RabbitMQ", "Valkey", "lb_dev_", "lingbot submit"):
        assert word in up.stdout
    answer = home.lingbot("submit", "hello", "--max-tokens", "24", "--seed", "1")
    assert answer.returncode == 0, answer.stderr
    job = json.loads(home.lingbot("jobs", "--json").stdout)[0]["id"]

    doctor = home.lingbot("doctor", "--json")
    assert [finding for finding in json.loads(doctor.stdout) if not finding["ok"]] == []
    assert "Flower" in doctor.stdout

    second = home.lingbot("up")
    assert second.returncode == 1
    assert "already runs" in second.stderr

    ports = (home.state / "ports.json").read_text()
    assert home.lingbot("down").returncode == 0
    assert _gone(home) == []

    assert home.lingbot("up", "--detach").returncode == 0
    assert (home.state / "ports.json").read_text() == ports
    assert home.lingbot("tail", job, "--from-start").stdout == answer.stdout


def test_a_killed_supervisor_leaves_nothing_and_the_next_start_works(home: Home) -> None:
    if not home.processes():
        assert home.lingbot("up", "--detach").returncode == 0
    supervisor = home.supervisor()
    supervisor.kill()
    supervisor.wait(10)
    assert _gone(home) == []
    assert home.lingbot("up", "--detach").returncode == 0
    assert home.lingbot("submit", "hello", "--max-tokens", "4").returncode == 0


def test_a_killed_part_comes_back(home: Home) -> None:
    if not home.processes():
        assert home.lingbot("up", "--detach").returncode == 0
    api = psutil.Process(int((home.state / "run" / "api.pid").read_text().split()[0]))
    api.kill()
    psutil.wait_procs([api], 5)
    deadline = time.monotonic() + 30
    while home.lingbot("models", "list").returncode != 0:
        assert time.monotonic() < deadline
    assert home.lingbot("submit", "hello", "--max-tokens", "4").returncode == 0


def test_nothing_that_is_kept_can_be_read_by_others(home: Home) -> None:
    assert home.state.stat().st_mode & 0o077 == 0
    for name in ("lingbot.toml", "dev.key", "flower.password", "seal.key"):
        assert (home.state / name).stat().st_mode & 0o777 == 0o600
