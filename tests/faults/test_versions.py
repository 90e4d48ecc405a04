"""A rolling upgrade: two versions of the platform live side by side, and nothing is lost on the way up or back."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from brokers import names, topology
from brokers.settings import Settings
from compose import commands, keys, probes
from compose.servers import PortBook, Process
from tests.integration.test_worker import wait_until_it_consumes
from tests.platform import APART_MODEL

ROOT = Path(__file__).resolve().parents[2]
NEXT = names.VERSION + 1


@pytest.fixture(scope="module")
def next_version(state: Path) -> Path:
    """A copy of the source whose version is one higher."""
    tree = state / "next"
    for package in ("brokers", "producers", "workers", "compose"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    source = tree / "brokers" / "names.py"
    bumped, count = re.subn(
        rf"^VERSION = {names.VERSION}$", f"VERSION = {NEXT}", source.read_text(), flags=re.MULTILINE
    )
    assert count == 1
    source.write_text(bumped)
    return tree


class Fleet:
    """API and worker processes of either version."""

    def __init__(self, state: Path, settings: Settings, next_version: Path, ports: PortBook) -> None:
        self._state = state
        self._settings = settings
        self._trees = {"old": ROOT, "new": next_version}
        self._ports = ports
        self.running: list[Process] = []

    def worker(self, version: str) -> Process:
        name = f"{version}-worker"
        process = self._process(name, version, commands.worker(self._settings, [APART_MODEL], name=name))
        process.spawn()
        wait_until_it_consumes(process, self._settings)
        self._wait_for_log(process, "ready.")
        return process

    def api(self, version: str) -> tuple[Process, str]:
        port = self._ports.take(f"{version}-api")
        process = self._process(f"{version}-api", version, commands.api(), port=port)
        process.spawn()
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 20
        while not probes.api_ready(url):
            assert process.alive, process.tail(30)
            assert time.monotonic() < deadline, process.tail(30)
            time.sleep(0.05)
        return process, url

    def stop_all(self) -> None:
        for process in self.running:
            process.stop(grace_s=10)

    def _process(self, name: str, version: str, argv: list[str], **settings: object) -> Process:
        process = Process(
            name,
            argv,
            env=commands.environment(self._state / "lingbot.toml", **settings),
            log=self._state / "logs" / f"{name}.log",
            pid_file=self._state / "run" / f"{name}.pid",
            cwd=self._trees[version],
        )
        self.running.append(process)
        return process

    def _wait_for_log(self, process: Process, words: str) -> None:
        deadline = time.monotonic() + 20
        while words not in process.log.read_text():
            assert process.alive, process.tail(30)
            assert time.monotonic() < deadline, process.tail(30)
            time.sleep(0.05)


@pytest.fixture
def fleet(state: Path, settings: Settings, next_version: Path, ports: PortBook) -> Iterator[Fleet]:
    topology.declare(settings, [APART_MODEL])
    fleet = Fleet(state, settings, next_version, ports)
    yield fleet
    fleet.stop_all()


class Load(threading.Thread):
    """Submits jobs to whatever APIs there are until told to stop."""

    def __init__(self, key: str) -> None:
        super().__init__(name="load")
        self.urls: list[str] = []
        self.jobs: list[str] = []
        self.done = threading.Event()
        self._headers = {"Authorization": f"Bearer {key}"}

    def run(self) -> None:
        with httpx.Client(headers=self._headers, timeout=10, trust_env=False) as client:
            while not self.done.is_set():
                for url in list(self.urls):
                    body = {"model": APART_MODEL, "prompt": "rolling !slow@2", "max_tokens": 60, "seed": 4}
                    answer = client.post(f"{url}/v1/jobs", json={**body, "ignore_eos": True})
                    assert answer.status_code == 202, answer.text
                    self.jobs.append(answer.json()["id"])
                time.sleep(0.05)

    def results(self, url: str) -> list[dict[str, object]]:
        with httpx.Client(base_url=url, headers=self._headers, timeout=10, trust_env=False) as client:
            return [self._finished(client, job_id) for job_id in self.jobs]

    def _finished(self, client: httpx.Client, job_id: str) -> dict[str, object]:
        deadline = time.monotonic() + 60
        while True:
            job = dict(client.get(f"/v1/jobs/{job_id}").json())
            if job["status"] not in {"accepted", "queued", "running"}:
                return job
            assert time.monotonic() < deadline, job
            time.sleep(0.1)


@pytest.mark.timeout(180)
def test_an_upgrade_rolls_through_workers_then_apis_and_loses_nothing(fleet: Fleet, settings: Settings) -> None:
    old_worker = fleet.worker("old")
    old_api, old_url = fleet.api("old")
    load = Load(keys.create(settings, "rolling", {"submit", "read"}, "tests"))
    load.urls = [old_url]
    load.start()
    try:
        time.sleep(1)
        fleet.worker("new")  # workers first: they take both versions' messages
        old_worker.stop(grace_s=40)
        time.sleep(1)
        _, new_url = fleet.api("new")
        load.urls = [old_url, new_url]
        time.sleep(1)
        load.urls = [new_url]
        time.sleep(0.5)
        old_api.stop(grace_s=10)
        time.sleep(1)
    finally:
        load.done.set()
        load.join()
    results = load.results(new_url)
    assert len(results) > 40
    assert {result["status"] for result in results} == {"succeeded"}
    assert len({str(result["result"]) for result in results}) == 1
