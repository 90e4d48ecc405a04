"""What workers give up on waits in the dead-letter queue: looked at, replayed as a new job, or dropped."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from brokers import envelope, names, topology
from brokers.job import Job, Kind, Lane, Sampling, State, TextSpec, new_job_id
from brokers.seal import Sealer
from brokers.settings import Settings
from tests.platform import Platform

_PROMPT = "nobody may read this"


@pytest.fixture(scope="module")
def http(platform: Platform) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {platform.admin_key}"}
    with httpx.Client(base_url=platform.base_url, headers=headers, timeout=20) as client:
        yield client


def _bury(settings: Settings, body: bytes | None = None) -> str:
    """A message in the dead-letter queue, as a worker's rejection leaves it; the job's id."""
    now_ms = int(time.time() * 1000)
    job = Job(
        id=new_job_id(settings.region),
        tenant="acceptance",
        kind=Kind.TEXT,
        model="scripted",
        lane=Lane.STANDARD,
        home=settings.region,
        place=settings.region,
        state=State.ACCEPTED,
        created_ms=now_ms,
        deadline_ms=now_ms + 60_000,
        prompt_tokens=len(_PROMPT),
        gen=2,
    )
    sealer = Sealer(settings)
    sealed = sealer.seal(job, TextSpec(tuple(_PROMPT.encode()), Sampling(max_tokens=8, seed=4)))
    properties, packed = envelope.encode(envelope.pack(job, sealed))
    with topology.connection(settings, settings.region) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish(names.DEAD_EXCHANGE, "", packed if body is None else body, properties, mandatory=True)
    return job.id


def _dead(http: httpx.Client) -> dict[str, dict[str, Any]]:
    return {letter["job"]: letter for letter in http.get("/v1/dead", params={"limit": 100}).json()["data"]}


def _until(condition: Callable[[], Any], timeout_s: float = 30) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.1)
    return found


def test_a_job_that_kills_its_workers_is_dead_lettered_and_dies_again_when_replayed(
    platform: Platform, http: httpx.Client
) -> None:
    body = {"model": platform.model, "prompt": "poison !crash@3", "max_tokens": 8, "metadata": {"a": "b"}}
    job = http.post("/v1/jobs", json=body).json()
    letter = _until(lambda: _dead(http).get(job["id"]))
    assert (letter["readable"], letter["reason"], letter["tenant"]) == (True, "rejected", "acceptance")
    assert letter["status"] == "failed"
    assert letter["queue"] == names.queue(platform.settings.region, platform.model, Lane.STANDARD)
    assert http.get(job["urls"]["self"]).json()["error"]["code"] == "poison"
    replayed = http.post(f"/v1/dead/{job['id']}/replay")
    again = replayed.json()
    assert (replayed.status_code, again["metadata"]) == (202, {"a": "b"})
    assert again["id"] != job["id"]
    assert job["id"] not in _dead(http)
    _until(lambda: _dead(http).get(again["id"]))
    assert http.delete(f"/v1/dead/{again['id']}").status_code == 204


def test_looking_takes_nothing_away_and_shows_no_prompt(
    platform: Platform, http: httpx.Client, settings: Settings
) -> None:
    buried = [_bury(settings) for _ in range(3)]
    for _ in range(3):
        assert [job for job in _dead(http) if job in buried] == buried  # the oldest first
        shown = http.get(f"/v1/dead/{buried[1]}")
        assert (shown.status_code, shown.json()["job"]) == (200, buried[1])
        assert _PROMPT not in shown.text
        assert "sealed" not in shown.text
    for job in buried:
        assert http.delete(f"/v1/dead/{job}").status_code == 204
        assert http.delete(f"/v1/dead/{job}").status_code == 404
    assert not set(buried) & set(_dead(http))


def test_a_replayed_letter_is_a_new_job_that_says_the_same(
    platform: Platform, http: httpx.Client, settings: Settings
) -> None:
    made = http.post(f"/v1/dead/{_bury(settings)}/replay").json()
    ended = _until(lambda: (job := http.get(made["urls"]["self"]).json())["status"] == "succeeded" and job)
    ask = {"model": platform.model, "prompt": _PROMPT, "max_tokens": 8, "seed": 4}
    fresh = http.post("/v1/jobs", json=ask, headers={"Prefer": "wait=10"}).json()
    assert ended["result"] == fresh["result"]


def test_a_letter_that_is_no_jobs_is_shown_and_can_only_be_dropped(http: httpx.Client, settings: Settings) -> None:
    job = _bury(settings, body=b"not what we send")
    assert _dead(http)[job]["readable"] is False
    refused = http.post(f"/v1/dead/{job}/replay")
    assert (refused.status_code, refused.json()["code"]) == (409, "dead_letter_unreadable")
    assert job in _dead(http)
    assert http.delete(f"/v1/dead/{job}").status_code == 204


def test_dead_letters_are_for_admins(platform: Platform) -> None:
    key = platform.new_key("acceptance", {"submit", "read"})
    refused = httpx.get(f"{platform.base_url}/v1/dead", headers={"Authorization": f"Bearer {key}"})
    assert refused.status_code == 403


def test_the_command_lists_shows_replays_and_drops(platform: Platform, http: httpx.Client, settings: Settings) -> None:
    def lingbot(*arguments: str) -> subprocess.CompletedProcess[str]:
        target = ("--url", platform.base_url, "--key", platform.admin_key)
        command = [sys.executable, "-m", "compose.cli.main", *arguments, *target]
        return subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)

    first, second = _bury(settings), _bury(settings)
    assert first in lingbot("dead", "list").stdout
    assert '"readable": true' in lingbot("dead", "show", first).stdout
    made = lingbot("dead", "replay", first).stdout.strip()
    assert http.get(f"/v1/jobs/{made}").status_code == 200
    assert lingbot("dead", "drop", second).returncode == 0
    missing = lingbot("dead", "show", second)
    assert missing.returncode == 1
    assert "hint:" in missing.stderr
    assert lingbot("webhooks", "list").returncode == 0
    assert lingbot("webhooks", "replay", second).returncode == 1
    assert lingbot("erase", made).returncode == 0
    assert http.get(f"/v1/jobs/{made}").status_code == 404
