"""Jobs over HTTP: submit, wait, see, list, cancel; and what a client is told while a part is away."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from compose.servers import RabbitMQ, Valkey
from compose.servers.server import Server
from tests.platform import Platform

_TERMINAL = {"succeeded", "failed", "cancelled", "expired"}
_LONG = "a long one !slow@5"  # 5 ms a token


@pytest.fixture(scope="module")
def http(platform: Platform) -> Iterator[httpx.Client]:
    with _client(platform, platform.api_key) as client:
        yield client


def _client(platform: Platform, key: str) -> httpx.Client:
    return httpx.Client(base_url=platform.base_url, headers={"Authorization": f"Bearer {key}"}, timeout=20)


def _submit(http: httpx.Client, platform: Platform, prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/jobs", json={"model": platform.model, "prompt": prompt, "max_tokens": 24, **fields})
    assert response.status_code == 202, response.text
    return response.json()  # type: ignore[no-any-return]


def _until(http: httpx.Client, job: dict[str, Any], states: set[str], timeout_s: float = 10) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        shown: dict[str, Any] = http.get(job["urls"]["self"]).json()
        if shown["status"] in states:
            return shown
        time.sleep(0.02)
    raise AssertionError(f"the job is still {shown['status']}")


def _ended(http: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    return _until(http, job, _TERMINAL)


@contextmanager
def _frozen(server: Server) -> Iterator[None]:
    """A server that neither answers nor closes its connections: what a network partition looks like."""
    group = os.getpgid(server.process.pid)
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


def test_a_job_is_accepted_with_everything_needed_to_follow_it(platform: Platform, http: httpx.Client) -> None:
    response = http.post("/v1/jobs", json={"model": platform.model, "prompt": "hi !slow@50", "max_tokens": 8})
    job = response.json()
    assert response.status_code == 202
    assert response.headers["Location"] == job["urls"]["self"] == f"/v1/jobs/{job['id']}"
    assert job["status"] in {"queued", "running"}  # a worker may have it before its confirm is heard of
    assert (job["object"], job["model"], job["lane"]) == ("job", platform.model, "standard")
    assert job["stream"]["key"].endswith(f":out:acceptance:{job['id']}")
    assert job["id"].startswith(platform.settings.region)


def test_a_job_that_has_ended_shows_its_text_and_usage(platform: Platform, http: httpx.Client) -> None:
    job = _ended(http, _submit(http, platform, max_tokens=24, metadata={"a": "ü"}))
    assert job["status"] == "succeeded"
    assert job["result"]["finish_reason"] == "length"
    assert job["usage"] == {"prompt_tokens": 5, "completion_tokens": 24}
    assert job["metadata"] == {"a": "ü"}
    assert len(job["result"]["text"].encode()) <= 24  # a byte a token, and no half character
    assert "�" not in job["result"]["text"]


def test_prefer_wait_answers_with_the_result(platform: Platform, http: httpx.Client) -> None:
    body = {"model": platform.model, "prompt": "hello", "max_tokens": 24, "seed": 3}
    first, second = (http.post("/v1/jobs", json=body, headers={"Prefer": "wait=10"}) for _ in range(2))
    assert first.status_code == 200
    assert first.headers["Preference-Applied"] == "wait=10"
    assert first.json()["status"] == "succeeded"
    assert first.json()["result"] == second.json()["result"]  # the same seed


def test_a_wait_that_is_too_short_answers_202_and_the_job_goes_on(platform: Platform, http: httpx.Client) -> None:
    body = {"model": platform.model, "prompt": _LONG, "max_tokens": 400}
    started = time.monotonic()
    response = http.post("/v1/jobs", json=body, headers={"Prefer": "respond-async, wait=1"})
    assert 0.9 < time.monotonic() - started < 1.9
    assert response.status_code == 202
    assert response.json()["status"] == "running"
    assert _ended(http, response.json())["status"] == "succeeded"


def test_messages_and_prompt_are_two_ways_to_ask(platform: Platform, http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    asked = [{"messages": [{"role": "user", "content": content}]} for content in ("hello", parts)]
    base = {"model": platform.model, "max_tokens": 16, "seed": 1}
    texts = [http.post("/v1/jobs", json=base | way, headers={"Prefer": "wait=10"}).json()["result"] for way in asked]
    assert texts[0] == texts[1]


def test_a_stop_string_ends_the_text_and_is_not_shown(platform: Platform, http: httpx.Client) -> None:
    body = {"model": platform.model, "prompt": "stop", "max_tokens": 64, "seed": 9}
    whole = http.post("/v1/jobs", json=body, headers={"Prefer": "wait=10"}).json()["result"]["text"]
    stop = whole[20:24]
    cut = http.post("/v1/jobs", json={**body, "stop": stop}, headers={"Prefer": "wait=10"}).json()["result"]
    assert cut == {"text": whole[: whole.index(stop)], "finish_reason": "stop"}


def test_a_failed_job_says_why_and_keeps_what_it_wrote(platform: Platform, http: httpx.Client) -> None:
    job = _ended(http, _submit(http, platform, "please !raise@9", max_tokens=24))
    assert job["status"] == "failed"
    assert job["error"]["code"]
    assert job["result"]["finish_reason"] == "error"
    assert job["usage"]["completion_tokens"] == job["position"]


def test_cancel_stops_a_running_job_within_a_second(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform, _LONG, max_tokens=4000)
    _until(http, job, {"running"})
    asked = time.monotonic()
    response = http.post(job["urls"]["cancel"])
    assert response.status_code in {200, 202}
    ended = _ended(http, job)
    assert time.monotonic() - asked < 1.2
    assert ended["status"] == "cancelled"
    assert ended["result"]["finish_reason"] == "cancelled"


def test_cancelling_again_or_too_late_is_no_error(platform: Platform, http: httpx.Client) -> None:
    job = _ended(http, _submit(http, platform))
    for _ in range(2):
        response = http.post(job["urls"]["cancel"])
        assert response.status_code == 200
        assert response.json()["status"] == "succeeded"


def test_another_tenants_job_is_not_there(platform: Platform, http: httpx.Client) -> None:
    job = _submit(http, platform)
    with _client(platform, platform.new_key("stranger", {"submit", "read"})) as stranger:
        for response in (
            stranger.get(job["urls"]["self"]),
            stranger.get(job["urls"]["events"]),
            stranger.post(job["urls"]["cancel"]),
        ):
            assert response.status_code == 404
            assert response.json()["code"] == "job_not_found"
        assert stranger.get("/v1/jobs").json()["data"] == []


def test_the_listing_is_newest_first_and_pages_without_gap_or_repeat(platform: Platform) -> None:
    with _client(platform, platform.new_key("lister", {"submit", "read"})) as http:
        made = [_submit(http, platform, max_tokens=1)["id"] for _ in range(7)]
        seen: list[str] = []
        before: str | None = None
        while True:
            page = http.get("/v1/jobs", params={"limit": 3} | ({"before": before} if before else {})).json()
            seen += [job["id"] for job in page["data"]]
            if not page["has_more"]:
                break
            before = page["next_before"]
        assert len(seen) == len(set(seen)) == 7
        assert set(seen) == set(made)


def test_the_listing_can_be_limited_to_a_state(platform: Platform) -> None:
    with _client(platform, platform.new_key("filter", {"submit", "read"})) as http:
        done = _ended(http, _submit(http, platform, max_tokens=1))
        failed = _ended(http, _submit(http, platform, "please !raise@1"))
        assert [job["id"] for job in http.get("/v1/jobs?status=failed").json()["data"]] == [failed["id"]]
        assert [job["id"] for job in http.get("/v1/jobs?status=succeeded").json()["data"]] == [done["id"]]


def test_keys_are_asked_for_and_their_scopes_hold(platform: Platform) -> None:
    bare = httpx.get(f"{platform.base_url}/v1/jobs")
    assert (bare.status_code, bare.json()["code"]) == (401, "missing_api_key")
    assert bare.headers["WWW-Authenticate"].startswith("Bearer")
    for key in ("nonsense", "lb_acceptance_" + "0" * 40, platform.api_key + "x", "\xff"):
        headers = [(b"Authorization", f"Bearer {key}".encode("latin-1"))]
        wrong = httpx.get(f"{platform.base_url}/v1/jobs", headers=headers)
        assert (wrong.status_code, wrong.json()["code"]) == (401, "invalid_api_key")
    with _client(platform, platform.new_key("acceptance", {"read"})) as reader:
        refused = reader.post("/v1/jobs", json={"model": platform.model, "prompt": "x"})
        assert (refused.status_code, refused.json()["code"]) == (403, "missing_scope")
        assert "submit" in refused.json()["detail"]
    with _client(platform, platform.new_key("acceptance", {"submit"})) as submitter:
        assert submitter.get("/v1/jobs").status_code == 403
        assert submitter.get("/v1/keys").status_code == 403


def test_a_key_made_over_http_works_until_it_is_revoked(platform: Platform) -> None:
    with _client(platform, platform.admin_key) as admin:
        made = admin.post("/v1/keys", json={"scopes": ["read"], "name": "dash", "tenant": "guest"})
        assert made.status_code == 201
        key = made.json()
        assert key["key"].startswith("lb_guest_")
        shown = admin.get("/v1/keys", params={"tenant": "guest"}).json()["data"]
        assert [(k["id"], k["name"]) for k in shown] == [(key["id"], "dash")]
        assert "key" not in shown[0]
        with _client(platform, key["key"]) as guest:
            assert guest.get("/v1/jobs").status_code == 200
            assert admin.delete(f"/v1/keys/{key['id']}").status_code == 204
            assert guest.get("/v1/jobs").status_code == 401
        assert admin.delete(f"/v1/keys/{key['id']}").status_code == 404


def test_operators_routes_answer(platform: Platform) -> None:
    with _client(platform, platform.admin_key) as admin:
        assert admin.get("/healthz").json()["status"] == "ok"
        assert admin.get("/readyz").json()["parts"] == {"store": "ok", "broker": "ok", "process": "ok"}
        assert "lingbot_http_requests_total" in admin.get("/metrics").text
        assert admin.get("/v1/status").json()["region"] == platform.settings.region


def test_every_route_is_in_the_document(platform: Platform) -> None:
    document = httpx.get(f"{platform.base_url}/openapi.json").json()
    paths = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert {"POST /v1/jobs", "GET /v1/jobs/{job_id}/events", "POST /v1/chat/completions", "GET /v1/models"} <= paths
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["summary"]
            assert "HTTPValidationError" not in str(operation["responses"])  # FastAPI's own shape
    assert "JobRequest" in document["components"]["schemas"]


def test_the_documentation_needs_no_other_host(platform: Platform) -> None:
    page = httpx.get(f"{platform.base_url}/docs")
    assert page.status_code == 200
    assets = re.findall(r"""(?:src|href)="([^"]+)""", page.text)
    assert {asset.rsplit(".", 1)[-1] for asset in assets} == {"js", "css", "png"}
    assert not re.findall(r"(?:https?:)?//[\w.-]+", page.text)
    for asset in assets:
        answer = httpx.get(f"{platform.base_url}{asset}")
        assert answer.status_code == 200
        assert len(answer.content) > 1000
        if asset.endswith(".css"):
            assert not re.findall(r"""@import|url\(["']?(?!["']?data:)""", answer.text)
    assert httpx.get(f"{platform.base_url}/docs/assets/nothing.js").json()["code"] == "not_found"


def test_a_callers_request_id_comes_back_unless_it_is_no_plain_word(http: httpx.Client) -> None:
    assert http.get("/healthz", headers={"X-Request-Id": "trace-1"}).headers["X-Request-Id"] == "trace-1"
    assert http.get("/healthz", headers={"X-Request-Id": "a b"}).headers["X-Request-Id"] != "a b"


def test_a_frozen_store_is_told_within_the_time_owed(platform: Platform, http: httpx.Client, valkey: Valkey) -> None:
    http.get("/v1/jobs")  # the key is in the cache now
    with _frozen(valkey):
        started = time.monotonic()
        response = http.post("/v1/jobs", json={"model": platform.model, "prompt": "x"})
        assert time.monotonic() - started < 1.5
        assert (response.status_code, response.json()["code"]) == (503, "store_unavailable")
        assert int(response.headers["Retry-After"]) >= 1
        assert http.get("/readyz").json()["parts"]["store"] == "unreachable"
        assert http.get("/healthz").status_code == 200
    _until_ready(http)
    _ended(http, _submit(http, platform))


def test_a_frozen_broker_is_told_within_the_time_owed_and_the_job_never_runs(
    platform: Platform, http: httpx.Client, rabbitmq: RabbitMQ
) -> None:
    with _frozen(rabbitmq):
        started = time.monotonic()
        response = http.post("/v1/jobs", json={"model": platform.model, "prompt": "x", "metadata": {"to": "withdraw"}})
        assert time.monotonic() - started < 1.5
        assert (response.status_code, response.json()["code"]) == (503, "broker_unavailable")
        assert "Retry-After" in response.headers
    _until_ready(http)
    _ended(http, _submit(http, platform))
    assert not [job for job in http.get("/v1/jobs").json()["data"] if job["metadata"].get("to")]


def test_a_running_stream_goes_on_while_the_broker_is_away(
    platform: Platform, http: httpx.Client, rabbitmq: RabbitMQ
) -> None:
    job = _submit(http, platform, _LONG, max_tokens=400)
    _until(http, job, {"running"})
    with _frozen(rabbitmq):
        assert http.post("/v1/jobs", json={"model": platform.model, "prompt": "x"}).status_code == 503
        events = http.get(job["urls"]["events"]).text  # all of it, to its end
    _until_ready(http)
    assert '"status":"succeeded"' in events.rpartition("event: end")[2]


def test_an_error_on_the_openai_routes_is_theirs_when_a_part_is_away(
    platform: Platform, http: httpx.Client, rabbitmq: RabbitMQ
) -> None:
    body = {"model": platform.model, "messages": [{"role": "user", "content": "x"}]}
    with _frozen(rabbitmq):
        response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "broker_unavailable"
    assert "Retry-After" in response.headers
    _until_ready(http)


def _until_ready(http: httpx.Client) -> None:
    deadline = time.monotonic() + 15
    while http.get("/readyz").status_code != 200:
        assert time.monotonic() < deadline, "the API did not come back"
        time.sleep(0.05)
