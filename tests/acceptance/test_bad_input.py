"""Whatever a client sends, it gets a 4xx that says what to change, and nothing is stored."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.platform import Platform

_DEEP = "[" * 100_000
_ROUTES = ("/v1/jobs", "/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def http(platform: Platform) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    with httpx.Client(base_url=platform.base_url, headers=headers, timeout=10) as client:
        yield client


def _job(model: str, **fields: Any) -> bytes:
    body = {"model": model, "prompt": "hello", **fields}
    return json.dumps({name: value for name, value in body.items() if value is not ...}).encode()


def _code(response: httpx.Response) -> str:
    body = response.json()
    error = body.get("error", body)
    assert error["request_id"] == response.headers["X-Request-Id"]
    assert error["hint"]
    return str(error["code"])


def _count(http: httpx.Client) -> int:
    return len(http.get("/v1/jobs", params={"limit": 100}).json()["data"])


@pytest.mark.parametrize("route", _ROUTES)
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"hello", "invalid_json"),
        (b'{"model": "scripted", "temperature": NaN}', "invalid_json"),
        (b'{"model": "scripted", "temperature": -Infinity}', "invalid_json"),
        (b"[]", "invalid_parameter"),
        (b"null", "invalid_parameter"),
        (b"{}", "missing_field"),
        (_DEEP.encode(), "invalid_parameter"),
        (b'{"model": "scripted", "store": %s' % _DEEP.encode(), "too_deep"),
        (b'{"model": "scr\xffipted"}', "invalid_text"),
        (b'{"model": "\xed\xa0\x80"}', "invalid_text"),
        (b'{"model": "\\ud800 and more text after it"}', "invalid_text"),
        (b'{"model": "\\ud800"}', "invalid_text"),
        (b'{"model": "\\udc00\\ud800 the wrong way round"}', "invalid_text"),
    ],
)
def test_what_is_no_request_is_refused_on_every_route(http: httpx.Client, route: str, body: bytes, code: str) -> None:
    if code == "too_deep" and route == "/v1/jobs":
        code = "unknown_field"
    response = http.post(route, content=body)
    assert (response.status_code, _code(response)) == (400, code)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": ""}, "empty_prompt", "prompt"),
        ({"prompt": ...}, "invalid_parameter", "prompt"),
        ({"prompt": 7}, "invalid_parameter", "prompt"),
        ({"prompt": None, "messages": []}, "invalid_parameter", "messages"),
        ({"messages": [{"role": "user", "content": "both"}]}, "invalid_parameter", "prompt"),
        ({"prompt": ..., "messages": [{"role": "robot", "content": "x"}]}, "invalid_parameter", "messages[0].role"),
        ({"prompt": ..., "messages": [{"role": "user", "content": "x", "zip": 1}]}, "unknown_field", "messages[0].zip"),
        ({"prompt": ..., "messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
        ({"prompt": "a\0b"}, "invalid_text", "prompt"),
        ({"stop": "a\0b"}, "invalid_text", "stop"),
        ({"stop": ""}, "invalid_parameter", "stop"),
        ({"stop": ["x"] * 17}, "invalid_parameter", "stop"),
        ({"max_tokens": 0}, "invalid_parameter", "max_tokens"),
        ({"max_tokens": -1}, "invalid_parameter", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_parameter", "max_tokens"),
        ({"max_tokens": "10"}, "invalid_parameter", "max_tokens"),
        ({"max_tokens": True}, "invalid_parameter", "max_tokens"),
        ({"max_tokens": 10**30}, "invalid_parameter", "max_tokens"),
        ({"max_tokens": 2**31 - 1}, "context_exceeded", "max_tokens"),
        ({"temperature": -1}, "invalid_parameter", "temperature"),
        ({"temperature": 3}, "invalid_parameter", "temperature"),
        ({"temperature": "hot"}, "invalid_parameter", "temperature"),
        ({"top_p": 0}, "invalid_parameter", "top_p"),
        ({"top_p": 1.1}, "invalid_parameter", "top_p"),
        ({"top_k": -1}, "invalid_parameter", "top_k"),
        ({"min_p": 1}, "invalid_parameter", "min_p"),
        ({"seed": 2**63}, "invalid_parameter", "seed"),
        ({"repetition_penalty": 0}, "invalid_parameter", "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "invalid_parameter", "repetition_penalty"),
        ({"presence_penalty": 2.5}, "invalid_parameter", "presence_penalty"),
        ({"lane": "express"}, "invalid_parameter", "lane"),
        ({"kind": "song"}, "invalid_parameter", "kind"),
        ({"kind": "image"}, "not_supported_yet", "kind"),
        ({"input": "embed me"}, "unsupported_model", "input"),
        ({"region": "elsewhere"}, "not_supported_yet", "region"),
        ({"residency": "eu"}, "not_supported_yet", "residency"),
        ({"start_at": "tomorrow"}, "invalid_parameter", "start_at"),
        ({"start_at": "2026-12-01T08:00:00"}, "invalid_parameter", "start_at"),
        ({"start_at": 4e9}, "invalid_parameter", "start_at"),
        ({"delay": -1}, "invalid_parameter", "delay"),
        ({"delay": 8 * 24 * 3600}, "invalid_parameter", "delay"),
        ({"delay": 1, "start_at": 1}, "invalid_parameter", "delay"),
        ({"webhook": "https://example.com"}, "invalid_parameter", "webhook"),
        ({"webhook": {}}, "missing_field", "webhook.url"),
        ({"webhook": {"url": "ftp://example.com"}}, "invalid_parameter", "webhook.url"),
        ({"webhook": {"url": "https://10.0.0.1/"}}, "invalid_parameter", "webhook.url"),
        ({"webhook": {"url": "https://[::ffff:169.254.169.254]/"}}, "invalid_parameter", "webhook.url"),
        ({"webhook": {"url": "https://user:pw@example.com/"}}, "invalid_parameter", "webhook.url"),
        ({"webhook": {"url": "https://example.com/", "secret": "short"}}, "invalid_parameter", "webhook.secret"),
        ({"backpressure": "pause"}, "invalid_parameter", "backpressure"),
        ({"expires_in": 0}, "invalid_parameter", "expires_in"),
        ({"expires_in": 10**7}, "invalid_parameter", "expires_in"),
        ({"metadata": {"a": 1}}, "invalid_parameter", "metadata[...]"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "invalid_parameter", "metadata"),
        ({"metadata": {"a": "x" * 513}}, "invalid_parameter", "metadata[...]"),
        ({"metadata": {"x" * 65: "a"}}, "invalid_parameter", "metadata"),
        ({"logit_bias": {"65": 101}}, "invalid_parameter", "logit_bias[...]"),
        ({"logit_bias": {"the": 1}}, "invalid_parameter", "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "invalid_parameter", "logit_bias"),
        ({"logit_bias": {"259": 1}}, "invalid_parameter", "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "invalid_parameter", "logit_bias"),
        ({"stop_token_ids": [259]}, "invalid_parameter", "stop_token_ids"),
        ({"stop_token_ids": list(range(17))}, "invalid_parameter", "stop_token_ids"),
        ({"logprobs": 21}, "invalid_parameter", "logprobs"),
        ({"logprobs": True}, "invalid_parameter", "logprobs"),
        ({"response_format": {"type": "yaml"}}, "invalid_parameter", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "missing_field", "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "invalid_parameter", "ignore_eos"),
        ({"n": 2}, "unknown_field", "n"),
        ({"max_new_tokens": 5}, "unknown_field", "max_new_tokens"),
        ({"stream": True}, "unknown_field", "stream"),
    ],
)
def test_a_wrong_field_is_named(
    platform: Platform, http: httpx.Client, fields: dict[str, Any], code: str, param: str
) -> None:
    response = http.post("/v1/jobs", content=_job(platform.model, **fields))
    assert (response.status_code, _code(response)) == (400, code)
    assert response.json()["param"] == param


def test_text_after_the_body_is_refused(platform: Platform, http: httpx.Client) -> None:
    response = http.post("/v1/jobs", content=_job(platform.model) + b"{}")
    assert (response.status_code, _code(response)) == (400, "invalid_json")


def test_a_number_beyond_floating_point_is_refused(platform: Platform, http: httpx.Client) -> None:
    body = b'{"model": "%s", "prompt": "x", "temperature": 1e999}' % platform.model.encode()
    response = http.post("/v1/jobs", content=body)
    assert (response.status_code, _code(response)) == (400, "invalid_parameter")


def test_an_unknown_model_is_404_on_every_route(http: httpx.Client) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/jobs": {"prompt": "x"},
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    for route, body in bodies.items():
        for name in ("nope", "../../etc/passwd", "scripted\0", "x" * 128):
            response = http.post(route, json={"model": name, **body})
            assert (response.status_code, _code(response)) == (404, "unknown_model"), (route, name)


def test_a_prompt_beyond_the_context_is_told_both_numbers(platform: Platform, http: httpx.Client) -> None:
    response = http.post("/v1/jobs", content=_job(platform.model, prompt="x" * 9000))
    assert (response.status_code, _code(response)) == (400, "context_exceeded")
    assert "9000" in response.json()["detail"]
    assert "8191" in response.json()["detail"]


def test_max_tokens_beyond_the_room_is_told_what_fits(platform: Platform, http: httpx.Client) -> None:
    response = http.post("/v1/jobs", content=_job(platform.model, prompt="x" * 8000, max_tokens=193))
    assert (response.status_code, _code(response)) == (400, "context_exceeded")
    assert "192" in response.json()["hint"]


def test_a_prompt_of_too_many_characters_is_not_tokenized(platform: Platform, http: httpx.Client) -> None:
    chars = platform.settings.max_prompt_chars + 1
    response = http.post("/v1/jobs", content=_job(platform.model, prompt="x" * chars))
    assert (response.status_code, _code(response)) == (400, "prompt_too_long")
    assert str(chars) in response.json()["detail"]


@pytest.mark.parametrize("route", ["/v1/jobs", "/v1/embeddings", "/v1/completions"])
def test_a_large_body_is_refused_by_its_length(platform: Platform, http: httpx.Client, route: str) -> None:
    response = http.post(route, content=b" " * (platform.settings.max_embedding_body_bytes + 1))
    assert (response.status_code, _code(response)) == (413, "body_too_large")


def test_a_large_body_that_declares_no_length_is_refused(platform: Platform, http: httpx.Client) -> None:
    block = b" " * 65536
    many = platform.settings.max_embedding_body_bytes // 65536 + 2
    response = http.post("/v1/jobs", content=(block for _ in range(many)))
    assert (response.status_code, _code(response)) == (413, "body_too_large")


def test_a_body_that_only_inputs_may_have_is_refused_for_a_text(platform: Platform, http: httpx.Client) -> None:
    body = {"model": platform.model, "prompt": "x" * platform.settings.max_body_bytes}
    response = http.post("/v1/jobs", json=body)
    assert (response.status_code, _code(response)) == (413, "body_too_large")


def test_a_compressed_body_is_refused(http: httpx.Client) -> None:
    response = http.post("/v1/jobs", content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert (response.status_code, _code(response)) == (415, "unsupported_encoding")


def test_a_body_that_trickles_is_cut_off(platform: Platform) -> None:
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {platform.api_key}\r\nContent-Length: 9\r\n\r\n{{"
    )
    with socket.create_connection((platform.settings.host, platform.settings.port), timeout=15) as connection:
        connection.sendall(head.encode())
        answer = b""
        while b"body_timeout" not in answer and (more := connection.recv(65536)):
            answer += more
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_timeout" in answer


def test_an_unknown_address_and_a_wrong_method_are_told_in_the_same_shape(http: httpx.Client) -> None:
    missing = http.get("/v1/nothing")
    assert (missing.status_code, _code(missing)) == (404, "not_found")
    wrong = http.put("/v1/jobs")
    assert (wrong.status_code, _code(wrong)) == (405, "method_not_allowed")
    wrong = http.head("/v1/jobs/x/events")
    assert wrong.status_code == 405
    wrong = http.get("/v1/chat/completions")
    assert (wrong.status_code, _code(wrong)) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    "job_id",
    ["x", "local", "local01", "nowhere01jd0000000000000000000000", "%00", "..%2f..", "local" + "0" * 26, "é" * 31],
)
def test_what_is_no_job_of_ours_is_404(http: httpx.Client, job_id: str) -> None:
    for response in (
        http.get(f"/v1/jobs/{job_id}"),
        http.get(f"/v1/jobs/{job_id}/events"),
        http.post(f"/v1/jobs/{job_id}/cancel"),
    ):
        assert response.status_code == 404
        assert _code(response) in {"job_not_found", "not_found"}


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "limit=x", "status=done", "before=x", "before=mars" + "0" * 26]
)
def test_a_wrong_listing_is_refused(http: httpx.Client, query: str) -> None:
    response = http.get(f"/v1/jobs?{query}")
    assert response.status_code == 400
    assert _code(response) in {"invalid_parameter", "bad_cursor"}


def test_refused_requests_store_nothing(platform: Platform, http: httpx.Client) -> None:
    before = _count(http)
    http.post("/v1/jobs", content=_job(platform.model, temperature=3))
    http.post("/v1/jobs", content=_job("nope"))
    http.post("/v1/jobs", content=_job(platform.model, max_tokens=100_000))
    http.post(
        "/v1/chat/completions", json={"model": platform.model, "messages": [{"role": "user", "content": "x"}], "n": 9}
    )
    assert _count(http) == before


def test_an_error_never_holds_the_prompt(platform: Platform, http: httpx.Client) -> None:
    secret = "the-secret-word"
    for body in (
        _job(platform.model, prompt=secret, temperature=9),
        _job(platform.model, prompt=secret * 1000),
        _job(platform.model, prompt=secret + "\0"),
        _job(platform.model, prompt=[secret]),
    ):
        response = http.post("/v1/jobs", content=body)
        assert response.status_code == 400
        assert secret not in response.text


@pytest.mark.parametrize(
    "start",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: ",
        b"GET /",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2;",
    ],
    ids=["header", "address", "chunk extension"],
)
def test_a_head_without_an_end_is_cut_off(platform: Platform, http: httpx.Client, start: bytes) -> None:
    with socket.create_connection((http.base_url.host, http.base_url.port or 80), timeout=5) as connection:
        connection.sendall(start)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(b"a" * (64 << 20))
    assert http.get("/healthz").status_code == 200


def test_a_head_that_is_too_large_is_told_so(http: httpx.Client) -> None:
    with socket.create_connection((http.base_url.host, http.base_url.port or 80), timeout=5) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 70_000)
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"head_too_large" in answer


def test_headers_of_a_usual_size_pass(http: httpx.Client) -> None:
    assert http.get("/healthz", headers={"X-Long": "a" * 40_000}).status_code == 200


@pytest.mark.parametrize("tenant", ["", "two words", "UPPER", "x" * 33, "line\n"])
def test_a_tenant_that_is_no_word_is_refused(platform: Platform, http: httpx.Client, tenant: str) -> None:
    admin = {"Authorization": f"Bearer {platform.admin_key}"}
    response = http.post("/v1/keys", headers=admin, json={"scopes": ["read"], "tenant": tenant})
    assert (response.status_code, _code(response)) == (400, "invalid_parameter")
