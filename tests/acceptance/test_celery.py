"""A worker is a plain Celery worker: its users' tools work on it, and a stopped one loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from brokers import management
from tests.platform import Platform


def celery(platform: Platform, state: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "celery", "-A", "workers.app", *arguments]
    env = {**os.environ, "LINGBOT_CONFIG": str(state / "lingbot.toml"), "NO_COLOR": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def client(platform: Platform) -> httpx.Client:
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    return httpx.Client(base_url=platform.base_url, headers=headers, timeout=30)


def submit(http: httpx.Client, platform: Platform, prompt: str, max_tokens: int) -> str:
    body = {"model": platform.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "seed": 5}
    answer = http.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def wait_for(http: httpx.Client, job_id: str, *states: str, seconds: float = 30) -> dict[str, object]:
    deadline = time.monotonic() + seconds
    while True:
        job = dict(http.get(f"/v1/jobs/{job_id}").json())
        if job["status"] in states:
            return job
        assert time.monotonic() < deadline, job
        time.sleep(0.05)


def test_inspect_shows_queues_and_running_jobs_and_no_prompt(platform: Platform, state: Path) -> None:
    with client(platform) as http:
        job_id = submit(http, platform, "asecretword !slow@5", 2000)
        wait_for(http, job_id, "running")
        active = celery(platform, state, "inspect", "active")
        queues = celery(platform, state, "inspect", "active_queues")
        http.post(f"/v1/jobs/{job_id}/cancel")
    assert job_id in active
    assert "asecretword" not in active
    for lane in ("interactive", "standard", "batch"):
        assert f"gen.{platform.settings.region}.{platform.model}.{lane}" in queues


def test_a_revoke_with_terminate_cancels_the_job(platform: Platform, state: Path) -> None:
    with client(platform) as http:
        job_id = submit(http, platform, "revoked !slow@5", 5000)
        wait_for(http, job_id, "running")
        celery(platform, state, "control", "terminate", "SIGTERM", job_id)
        job = wait_for(http, job_id, "cancelled", seconds=5)
    assert job["status"] == "cancelled"


def test_a_typo_in_the_queues_stops_the_start(platform: Platform, state: Path) -> None:
    out = celery(platform, state, "worker", "-Q", "gen.local.scripted.standart")
    assert "gen.local.scripted.standart" in out
    assert "ready" not in out.splitlines()[-1]


@pytest.mark.timeout(180)
def test_a_stopped_worker_hands_its_jobs_over_in_mid_stream(platform: Platform) -> None:
    """SIGTERM twice: no waiting. The jobs go back to the queue and on from where they were."""
    worker = platform.processes["worker"]
    with client(platform) as http:
        reference = [finish(http, submit(http, platform, f"handed {n} !slow@2", 900)) for n in range(4)]
        jobs = [submit(http, platform, f"handed {n} !slow@2", 900) for n in range(4)]
        for job_id in jobs:
            wait_for(http, job_id, "running")
        time.sleep(0.4)
        os.kill(worker.pid, 15)
        time.sleep(0.2)
        os.kill(worker.pid, 15)
        deadline = time.monotonic() + 20
        while worker.alive:
            assert time.monotonic() < deadline, worker.tail(30)
            time.sleep(0.1)
        assert {http.get(f"/v1/jobs/{job_id}").json()["status"] for job_id in jobs} == {"queued"}
        platform.restart("worker")
        assert [finish(http, job_id) for job_id in jobs] == reference
        assert all(http.get(f"/v1/jobs/{job_id}").json()["attempt"] == 2 for job_id in jobs)


def finish(http: httpx.Client, job_id: str) -> str:
    job = wait_for(http, job_id, "succeeded")
    result = job["result"]
    assert isinstance(result, dict)
    return str(result["text"])


def test_a_warm_stop_lets_jobs_finish(platform: Platform) -> None:
    worker = platform.processes["worker"]
    with client(platform) as http:
        job_id = submit(http, platform, "warm !slow@2", 800)
        wait_for(http, job_id, "running")
        os.kill(worker.pid, 15)
        job = wait_for(http, job_id, "succeeded")
        platform.restart("worker")
    assert job["attempt"] == 1


def test_a_killed_worker_costs_seconds_and_no_text(platform: Platform) -> None:
    with client(platform) as http:
        reference = finish(http, submit(http, platform, "killed !slow@2", 900))
        job_id = submit(http, platform, "killed !slow@2", 900)
        wait_for(http, job_id, "running")
        time.sleep(0.4)
        platform.kill("worker")
        platform.restart("worker")
        assert finish(http, job_id) == reference


def test_a_cancel_while_every_worker_is_dead_holds(platform: Platform) -> None:
    """Celery keeps revokes in its workers' memory. One job ran when they died, the other had not begun."""
    with client(platform) as http:
        running = submit(http, platform, "revoked while away !slow@5", 2000)
        wait_for(http, running, "running")
        platform.kill("worker")
        waiting = submit(http, platform, "revoked while away !slow@5", 2000)
        for job_id in (running, waiting):
            assert http.post(f"/v1/jobs/{job_id}/cancel").is_success
        platform.restart("worker")
        later = submit(http, platform, "after them", 5)
        wait_for(http, later, "succeeded")
        ended = [wait_for(http, job_id, "cancelled") for job_id in (running, waiting)]
    assert [job["attempt"] for job in ended] == [1, 0]


def test_the_logs_are_json_lines_without_a_trace_of_a_hand_back(platform: Platform) -> None:
    worker = platform.processes["worker"]
    with client(platform) as http:
        job_id = submit(http, platform, "asecretword !slow@5", 3000)
        wait_for(http, job_id, "running")
        os.kill(worker.pid, 15)
        time.sleep(0.2)
        os.kill(worker.pid, 15)
        wait_for(http, job_id, "queued")
        platform.restart("worker")
        http.post(f"/v1/jobs/{job_id}/cancel")
    for name in ("api", "reconciler"):
        lines = platform.processes[name].log.read_text().splitlines()
        assert all({"event", "level", "logger", "timestamp"} <= set(json.loads(line)) for line in lines)
    # The banner, on stdout, is in the same file: its lines have no brace in front.
    lines = [line for line in worker.log.read_text().splitlines() if line.startswith("{")]
    records = [json.loads(line) for line in lines]
    assert any(f"[{job_id}] received" in record["event"] for record in records)
    handed_back = [record for record in records if job_id in record["event"] and "handed back" in record["event"]]
    assert handed_back
    assert not any("exception" in record for record in handed_back)
    log = worker.log.read_text()
    assert "Traceback" not in "".join(line for line in log.splitlines() if not line.startswith("{"))
    assert "asecretword" not in log


async def test_every_queue_is_durable_or_exclusive(platform: Platform) -> None:
    """RabbitMQ 4.3 refuses the others. Control, its replies, and the events that Flower reads are there meanwhile."""
    from workers.app import create_app

    app = create_app(platform.settings)
    with app.connection_for_read() as connection:
        app.events.Receiver(connection).queue.bind(connection.default_channel).declare()
        assert app.control.ping(timeout=5, limit=1, connection=connection)
        found = await management.queues(platform.settings, platform.settings.region)
    assert {queue["name"].split(".")[0] for queue in found} >= {"gen", "celeryev"}
    assert any(queue["name"].endswith(".pidbox") for queue in found)
    assert [queue["name"] for queue in found if not (queue["durable"] or queue["exclusive"])] == []
