"""When jobs start and expire, that they can be erased, and what is counted of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from brokers.settings import Settings
from tests.platform import Platform


def _client(platform: Platform, tenant: str, scopes: set[str] | None = None) -> httpx.Client:
    key = platform.new_key(tenant, scopes or {"submit", "read"})
    return httpx.Client(base_url=platform.base_url, headers={"Authorization": f"Bearer {key}"}, timeout=20)


@pytest.fixture
def http(platform: Platform) -> Iterator[httpx.Client]:
    with _client(platform, "scheduler") as client:
        yield client


def _submit(http: httpx.Client, platform: Platform, prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/jobs", json={"model": platform.model, "prompt": prompt, "max_tokens": 8, **fields})
    assert response.status_code == 202, response.text
    return response.json()  # type: ignore[no-any-return]


def _until(condition: Callable[[], Any], timeout_s: float = 15) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)
    return found


def _ended(http: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        shown: dict[str, Any] = http.get(job["urls"]["self"]).json()
        return shown if "ended_at" in shown else None

    return _until(look)  # type: ignore[no-any-return]


def _running(status: dict[str, Any]) -> int:
    engines = [engine for worker in status["workers"] for engine in worker["engines"].values()]
    assert engines
    return sum(engine["stats"]["running"] for engine in engines)


@pytest.mark.parametrize("way", ["delay", "unix", "rfc3339"])
def test_a_job_starts_when_it_is_due_and_not_before(platform: Platform, http: httpx.Client, way: str) -> None:
    now = time.time()
    start: dict[str, dict[str, Any]] = {
        "delay": {"delay": 2},
        "unix": {"start_at": now + 2},
        "rfc3339": {"start_at": (datetime.fromtimestamp(now, UTC) + timedelta(seconds=2)).isoformat()},
    }
    job = _submit(http, platform, expires_in=60, **start[way])
    assert job["status"] == "accepted"
    assert job["start_at"] == pytest.approx(now + 2, abs=0.5)
    assert job["expires_at"] == pytest.approx(job["start_at"] + 60, abs=0.01)
    ended = _ended(http, job)
    assert ended["status"] == "succeeded"
    assert ended["start_at"] <= ended["started_at"] < ended["start_at"] + 2.5


def test_a_start_that_has_passed_is_at_once(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, start_at=1)
    assert job["status"] != "accepted"
    assert "start_at" not in job


def test_a_job_can_be_cancelled_before_its_start(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, delay=3600)
    cancelled = http.post(job["urls"]["cancel"])
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    assert cancelled.json()["usage"] == {"prompt_tokens": 0, "completion_tokens": 0}


def test_its_events_can_be_waited_for_before_the_start(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, delay=1.5)
    with http.stream("GET", job["urls"]["events"]) as response:
        text = "".join(response.iter_text())
    assert "event: token" in text
    assert '"status":"succeeded"' in text


def test_a_job_of_next_week_is_on_top_of_the_listing(platform: Platform) -> None:
    with _client(platform, "planner") as http:
        later = _submit(http, platform, delay=6 * 24 * 3600)
        now = _submit(http, platform)
        assert [job["id"] for job in http.get("/v1/jobs").json()["data"]] == [later["id"], now["id"]]
        page = http.get("/v1/jobs", params={"limit": 1}).json()
        rest = http.get("/v1/jobs", params={"before": page["next_before"]}).json()
        assert [job["id"] for job in rest["data"]] == [now["id"]]


def test_a_lane_has_its_own_deadline(platform: Platform, http: httpx.Client, settings: Settings) -> None:
    for lane in settings.lane_expires_s:
        job = _submit(http, platform, lane=lane.value)
        assert job["expires_at"] - job["created_at"] == settings.expires_s(lane)
    standard = _submit(http, platform)
    assert standard["expires_at"] - standard["created_at"] == settings.default_expires_s


def test_a_deadline_holds_in_the_engine(platform: Platform, http: httpx.Client) -> None:
    ended = _ended(http, _submit(http, platform, "x !slow@20", max_tokens=1000, expires_in=2))
    assert ended["status"] == "expired"
    assert ended["ended_at"] - ended["created_at"] < 3.5
    assert 0 < ended["usage"]["completion_tokens"] < 1000


def test_an_erased_job_is_nowhere_any_more(platform: Platform) -> None:
    with _client(platform, "eraser") as http:
        job = _ended(http, _submit(http, platform))
        assert http.delete(job["urls"]["self"]).status_code == 204
        answers = (
            http.get(job["urls"]["self"]),
            http.get(job["urls"]["events"]),
            http.post(job["urls"]["cancel"]),
            http.delete(job["urls"]["self"]),
        )
        assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {(404, "job_not_found")}
        assert http.get("/v1/jobs").json()["data"] == []


def test_erasing_ends_a_running_job_and_its_readers(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, "x !slow@20", max_tokens=4000)
    with http.stream("GET", job["urls"]["events"]) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line.startswith("event: token"))
        with _client(platform, "scheduler") as other:
            assert other.delete(job["urls"]["self"]).status_code == 204
        assert "stream_gone" in "".join(lines)
    with _client(platform, "admins", {"admin"}) as admin:
        _until(lambda: _running(admin.get("/v1/status").json()) == 0)


def test_another_tenants_job_cannot_be_erased(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform)
    with _client(platform, "vandal") as vandal:
        assert vandal.delete(job["urls"]["self"]).status_code == 404
    assert _ended(http, job)["status"] == "succeeded"


def test_usage_is_settled_once_also_of_what_was_cancelled_or_erased(platform: Platform) -> None:
    with _client(platform, "counted") as http:
        done = [_ended(http, _submit(http, platform)) for _ in range(2)]
        cancelled = _submit(http, platform, delay=600)
        http.post(cancelled["urls"]["cancel"])
        http.delete(done[0]["urls"]["self"])
        usage = _until(lambda: (found := http.get("/v1/usage").json())["jobs"] == 3 and found)
        assert usage["by_status"] == {"cancelled": 1, "succeeded": 2}
        assert usage["completion_tokens"] == sum(job["usage"]["completion_tokens"] for job in done) == 16
        assert usage["prompt_tokens"] == sum(job["usage"]["prompt_tokens"] for job in done)
        time.sleep(2)
        assert http.get("/v1/usage", params={"day": usage["day"]}).json() == usage
        assert http.get("/v1/usage", params={"day": "2001-01-01"}).json()["jobs"] == 0
        bad = http.get("/v1/usage", params={"day": "yesterday"})
        assert (bad.status_code, bad.json()["param"]) == (400, "day")
        assert http.get("/v1/usage", params={"tenant": "acceptance"}).status_code == 403
        with _client(platform, "admins", {"read", "admin"}) as admin:
            assert admin.get("/v1/usage", params={"tenant": "counted"}).json() == usage
