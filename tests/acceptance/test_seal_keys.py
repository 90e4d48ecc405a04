"""Seal keys are replaced while jobs come in: a process that holds no key for a job leaves it to one that does."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from compose import commands, probes
from compose.servers import PortBook, Process
from tests.platform import APART_MODEL, Platform


class Site:
    """Processes with and without a new key, which seals where it is known."""

    def __init__(self, state: Path, platform: Platform) -> None:
        self._state = state
        self._platform = platform
        self._new = json.dumps({"new": base64.b64encode(secrets.token_bytes(32)).decode()})
        self.running: list[Process] = []

    def api(self, port: int) -> str:
        self._spawn("keyed-api", commands.api(), port=port, seal_keys=self._new)
        url = f"http://127.0.0.1:{port}"
        _wait(lambda: probes.api_ready(url), self.running[-1])
        return url

    def worker(self, name: str, *, keyed: bool) -> Process:
        more = {"seal_keys": self._new} if keyed else {}
        return self._spawn(name, commands.worker(self._platform.settings, [APART_MODEL], name=name), **more)

    def stop(self) -> None:
        for process in self.running:
            process.stop(grace_s=5)

    def _spawn(self, name: str, argv: list[str], **settings: object) -> Process:
        process = Process(
            name,
            argv,
            env=commands.environment(self._state / "lingbot.toml", **settings),
            log=self._state / "logs" / f"{name}.log",
            pid_file=self._state / "run" / f"{name}.pid",
        )
        process.spawn()
        self.running.append(process)
        return process


@pytest.fixture
def site(state: Path, platform: Platform) -> Iterator[Site]:
    site = Site(state, platform)
    yield site
    site.stop()


def test_a_job_waits_for_a_worker_that_holds_its_key(site: Site, platform: Platform, ports: PortBook) -> None:
    url = site.api(ports.take("keyed-api"))
    keyless = site.worker("keyless", keyed=False)
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=10, trust_env=False) as client:
        job_id = client.post("/v1/jobs", json={"model": APART_MODEL, "prompt": "kept"}).json()["id"]
        _wait(lambda: f"job {job_id}: no seal key" in keyless.log.read_text(), keyless)
        waiting = client.get(f"/v1/jobs/{job_id}").json()
        assert (waiting["status"], waiting["attempt"]) == ("queued", 0)
        keyed = site.worker("keyed", keyed=True)
        _wait(lambda: client.get(f"/v1/jobs/{job_id}").json()["status"] == "succeeded", keyed)
        assert client.get(f"/v1/jobs/{job_id}").json()["attempt"] == 1


def _wait(true: Callable[[], bool], process: Process) -> None:
    deadline = time.monotonic() + 45
    while not true():
        assert process.alive, process.tail(30)
        assert time.monotonic() < deadline, process.tail(30)
        time.sleep(0.1)
