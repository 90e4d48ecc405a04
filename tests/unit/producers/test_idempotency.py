"""What an Idempotency-Key stands for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from brokers.job import id_age_s, new_job_id, nth_job_id
from brokers.keys import Principal
from producers.idempotency import Once, once
from producers.problems import Problem
from producers.schemas import JobRequest


def _once(key: str | None, body: dict[str, Any], tenant: str = "acme", path: str = "/v1/jobs") -> Once | None:
    headers = [] if key is None else [(b"idempotency-key", key.encode("latin-1"))]
    request = Request({"type": "http", "path": path, "headers": headers})
    return once(request, Principal(tenant, frozenset(), "id"), msgspec.convert({"model": "m", **body}, JobRequest))


def test_a_request_without_a_key_has_none() -> None:
    assert _once(None, {}) is None


def test_two_bodies_that_mean_the_same_are_the_same() -> None:
    one = _once("k", {"prompt": "x", "metadata": {"a": "1", "b": "2"}, "temperature": 1, "seed": None})
    assert one == _once("k", {"temperature": 1.0, "metadata": {"b": "2", "a": "1"}, "prompt": "x"})
    assert one != _once("k", {"prompt": "y", "metadata": {"a": "1", "b": "2"}, "temperature": 1})


def test_tenant_and_key_are_told_apart_and_the_route_is_part_of_the_body() -> None:
    first, other = _once("bc", {}, tenant="a"), _once("c", {}, tenant="ab")
    assert first is not None
    assert other is not None
    assert first.digest != other.digest
    elsewhere = _once("bc", {}, tenant="a", path="/v1/other")
    assert elsewhere is not None
    assert (elsewhere.digest, elsewhere.body != first.body) == (first.digest, True)


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "a\x7f", "\xe4", "a\n"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(Problem) as caught:
        _once(key, {})
    assert caught.value.param == "Idempotency-Key"


def test_the_ids_of_a_request_follow_from_the_first() -> None:
    first = new_job_id("local")
    ids = [nth_job_id(first, index) for index in range(40)]
    assert ids[0] == first
    assert ids == sorted(set(ids))
    assert all(len(each) == len(first) for each in ids)
    assert 0 <= id_age_s(first) < 5
