"""Errors: every code is in the catalogue, in both shapes, and what is internal stays inside."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from brokers import errors
from brokers.errors import LingbotError
from producers import problems
from producers.problems import CATALOGUE, Problem

_INTERNAL = {"bad_configuration", "seal_broken", "unknown_seal_key", "engine_failed"}


def _tree(kind: type[LingbotError]) -> Iterator[type[LingbotError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _tree(child)


@pytest.mark.parametrize("kind", list(_tree(LingbotError)), ids=lambda kind: kind.__name__)
def test_every_platform_error_has_a_status_or_is_internal(kind: type[LingbotError]) -> None:
    problem = problems.of(kind("said so"))
    if kind.code in _INTERNAL:
        assert (problem.code, problem.status) == ("internal_error", 500)
        assert "said so" not in problem.detail
    else:
        assert problem.code == kind.code
        assert problem.hint


def test_every_unavailable_error_carries_retry_after() -> None:
    for kind in _tree(errors.Unavailable):
        assert int(problems.of(kind()).headers["Retry-After"]) >= 1


def test_statuses_and_words_of_the_catalogue_are_whole() -> None:
    for code, entry in CATALOGUE.items():
        assert code == code.lower()
        assert 400 <= entry.status < 600
        assert entry.title


@pytest.mark.parametrize(
    ("path", "media"),
    [
        ("/v1/jobs", "application/problem+json"),
        ("/v1/chat/completions", "application/json"),
        ("/v1/completions", "application/json"),
        ("/v1/models/x", "application/json"),
    ],
)
def test_the_shape_follows_the_route(path: str, media: str) -> None:
    response = problems.response(Problem("missing_field", "x", param="y"), {"path": path, "request_id": "r"})
    body = msgspec.json.decode(bytes(response.body))
    assert response.media_type == media
    told = body.get("error", body)
    assert (told["code"], told["param"], told["request_id"]) == ("missing_field", "y", "r")
