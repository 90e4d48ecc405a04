"""Webhooks: a job's end is told, signed, until it was heard; and what never was is kept and can be told again."""

from __future__ import annotations

import base64
import json
import secrets
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import httpx
import pytest
from standardwebhooks.webhooks import Webhook

from tests.platform import Platform

_SECRET = f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"


class Delivery(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """A server that keeps what it is sent; a path with answers left answers those first, and then 204."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.answers: dict[str, list[int]] = {}
        self.stuck = 0  # requests to /stuck that wait to be let go
        self.let_go = threading.Event()
        self._came = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/stuck" and not receiver.let_go.is_set():
                    receiver.stuck += 1
                    receiver.let_go.wait(30)
                planned = receiver.answers.get(self.path, [])
                self.send_response(planned.pop(0) if planned else 204)
                self.end_headers()
                with receiver._came:
                    receiver.deliveries.append(Delivery(self.path, dict(self.headers), body))
                    receiver._came.notify_all()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}{path}"

    def wait(self, path: str, count: int, timeout_s: float = 15) -> list[Delivery]:
        """The deliveries to a path, once there are that many."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.at(path)) >= count, timeout_s), self.at(path)
            return self.at(path)

    def at(self, path: str) -> list[Delivery]:
        return [delivery for delivery in self.deliveries if delivery.path == path]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, daemon=True)
    thread.start()
    yield receiver
    receiver.server.shutdown()
    thread.join()
    receiver.server.server_close()


@pytest.fixture(scope="module")
def http(platform: Platform) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {platform.admin_key}"}
    with httpx.Client(base_url=platform.base_url, headers=headers, timeout=20) as client:
        yield client


def _submit(http: httpx.Client, platform: Platform, url: str, prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    webhook = {"url": url, "secret": _SECRET}
    body = {"model": platform.model, "prompt": prompt, "max_tokens": 8, "webhook": webhook, **fields}
    response = http.post("/v1/jobs", json=body)
    assert response.status_code == 202, response.text
    return response.json()  # type: ignore[no-any-return]


def test_the_end_of_a_job_is_told_signed_and_without_its_prompt(
    platform: Platform, http: httpx.Client, receiver: Receiver
) -> None:
    job = _submit(http, platform, receiver.url("/ok?a=b"), "an unusual prompt", metadata={"order": "7"})
    (told,) = receiver.wait("/ok?a=b", 1)
    event = Webhook(_SECRET).verify(told.body, told.headers)
    assert event["type"] == "job.succeeded"
    assert (event["data"]["id"], event["data"]["metadata"]) == (job["id"], {"order": "7"})
    assert event["data"]["usage"]["completion_tokens"] == 8
    assert b"unusual" not in told.body
    shown = http.get(f"/v1/jobs/{job['id']}").json()
    assert {**event["data"], "result": shown["result"]} == shown
    time.sleep(1.5)
    assert len(receiver.at("/ok?a=b")) == 1


def test_a_receiver_that_fails_is_told_again_under_the_same_id(
    platform: Platform, http: httpx.Client, receiver: Receiver
) -> None:
    receiver.answers["/flaky"] = [500, 302]
    _submit(http, platform, receiver.url("/flaky"))
    told = receiver.wait("/flaky", 3)
    lowered = [{name.lower(): value for name, value in delivery.headers.items()} for delivery in told]
    assert len({headers["webhook-id"] for headers in lowered}) == 1
    for delivery in told:
        Webhook(_SECRET).verify(delivery.body, delivery.headers)


@pytest.mark.parametrize(("prompt", "kind"), [("please !raise@3", "job.failed"), ("x !slow@20", "job.cancelled")])
def test_every_kind_of_end_is_told(
    platform: Platform, http: httpx.Client, receiver: Receiver, prompt: str, kind: str
) -> None:
    job = _submit(http, platform, receiver.url(f"/{kind}"), prompt, max_tokens=200)
    if kind == "job.cancelled":
        http.post(job["urls"]["cancel"])
    (told,) = receiver.wait(f"/{kind}", 1)
    assert json.loads(told.body)["type"] == kind


def test_a_job_cancelled_before_its_start_is_told(platform: Platform, http: httpx.Client, receiver: Receiver) -> None:
    job = _submit(http, platform, receiver.url("/early"), delay=600)
    assert http.post(job["urls"]["cancel"]).json()["status"] == "cancelled"
    (told,) = receiver.wait("/early", 1)
    assert json.loads(told.body)["type"] == "job.cancelled"


def test_one_that_was_never_heard_is_given_up_kept_and_told_again(
    platform: Platform, http: httpx.Client, receiver: Receiver
) -> None:
    receiver.answers["/deaf"] = [503] * 4  # the first try and three more, as the test's settings have it
    job = _submit(http, platform, receiver.url("/deaf"))
    receiver.wait("/deaf", 4)
    dead = _dead(http, job["id"])
    assert (dead["tenant"], dead["tries"], dead["error"]) == ("acceptance", 4, "HTTP status 503")
    assert http.post(f"/v1/webhooks/dead/{job['id']}/replay").status_code == 202
    receiver.wait("/deaf", 5)
    assert http.post(f"/v1/webhooks/dead/{job['id']}/replay").status_code == 404
    assert job["id"] not in {each["job"] for each in http.get("/v1/webhooks/dead").json()["data"]}


def test_a_receiver_that_says_gone_is_not_asked_again(
    platform: Platform, http: httpx.Client, receiver: Receiver
) -> None:
    receiver.answers["/gone"] = [410]
    job = _submit(http, platform, receiver.url("/gone"))
    assert _dead(http, job["id"])["tries"] == 1


def test_the_end_of_an_erased_job_is_told_to_nobody(platform: Platform, http: httpx.Client, receiver: Receiver) -> None:
    job = _submit(http, platform, receiver.url("/erased"), "x !slow@20", max_tokens=400)
    assert http.delete(f"/v1/jobs/{job['id']}").status_code == 204
    time.sleep(2.5)
    assert not receiver.at("/erased")


def test_what_was_due_while_the_reconciler_was_away_is_told_when_it_is_back(
    platform: Platform, http: httpx.Client, receiver: Receiver
) -> None:
    platform.kill("reconciler")
    try:
        _submit(http, platform, receiver.url("/later"))
        time.sleep(0.5)
        assert not receiver.at("/later")
    finally:
        platform.restart("reconciler")
    receiver.wait("/later", 1)


def test_a_tenant_whose_receiver_is_stuck_holds_up_no_other(
    platform: Platform, http: httpx.Client, receiver: Receiver
) -> None:
    other = {"Authorization": f"Bearer {platform.new_key('patient', {'submit', 'read'})}"}
    each = platform.settings.webhook_in_flight_each
    for _ in range(platform.settings.webhook_in_flight):
        _submit(http, platform, receiver.url("/stuck"), max_tokens=1)
    try:
        with httpx.Client(base_url=platform.base_url, headers=other, timeout=20) as patient:
            _submit(patient, platform, receiver.url("/free"), max_tokens=1)
        receiver.wait("/free", 1)
        assert 0 < receiver.stuck <= each
    finally:
        receiver.let_go.set()
    receiver.wait("/stuck", platform.settings.webhook_in_flight, timeout_s=40)


def test_dead_webhooks_are_for_admins(platform: Platform) -> None:
    key = platform.new_key("acceptance", {"submit", "read"})
    refused = httpx.get(f"{platform.base_url}/v1/webhooks/dead", headers={"Authorization": f"Bearer {key}"})
    assert refused.status_code == 403


def _dead(http: httpx.Client, job_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for each in http.get("/v1/webhooks/dead").json()["data"]:
            if each["job"] == job_id:
                return each  # type: ignore[no-any-return]
        time.sleep(0.05)
    raise AssertionError("the webhook is not among the dead")
