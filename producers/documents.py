"""The OpenAPI document: what FastAPI knows of its routes, and what the plain ones say of themselves.

The hot routes (submit, stream, OpenAI's generation) are plain functions decoding with msgspec, because FastAPI's way to
a handler costs more than all their own work (measured: 127 us against 45 us a request). Their operations are written
by hand, with schemas taken from the same msgspec structs that check the bodies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response

from producers.problems import CATALOGUE, OpenAIErrorBody, ProblemBody

Handler = Callable[[Request], Awaitable[Response]]
Responses = dict[int | str, dict[str, Any]]

_REF = "#/components/schemas/{name}"
_AUTH = ("missing_api_key", "invalid_api_key", "missing_scope")
_ALWAYS = ("store_unavailable", "internal_error")
BODY = (
    *("invalid_json", "too_deep", "invalid_text", "unknown_field", "missing_field", "invalid_parameter"),
    *("body_timeout", "body_too_large", "unsupported_encoding"),
)
PROMPT = (
    *("empty_prompt", "prompt_too_long", "context_exceeded", "bad_prompt", "unknown_model", "unsupported_model"),
    *("invalid_schema", "schema_too_complex"),
)
PUBLISH = ("broker_unavailable", "no_queue", "queue_full")


class Plain(NamedTuple):
    """A route FastAPI does not know, with its operation object."""

    method: str
    path: str
    handler: Handler
    operation: dict[str, Any]


def schema(struct: type) -> dict[str, Any]:
    return {"$ref": _REF.format(name=struct.__name__)}


def body_of(struct: type) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema(struct)}}}


def answer(description: str, struct: type | None = None, media: str = "application/json") -> dict[str, Any]:
    content = {"content": {media: {"schema": schema(struct)}}} if struct else {}
    return {"description": description, **content}


def failures(*codes: str, openai: bool = False, auth: bool = True) -> Responses:
    """Every error of a route by status, each code named."""
    struct, media = (OpenAIErrorBody, "application/json") if openai else (ProblemBody, "application/problem+json")
    wanted = sorted({*codes, *(_AUTH if auth else ()), *_ALWAYS}, key=lambda code: (CATALOGUE[code].status, code))
    return {
        status: answer(_describe(group), struct, media)
        for status, group in groupby(wanted, key=lambda code: CATALOGUE[code].status)
    }


def query(name: str, kind: str, description: str, **extra: Any) -> dict[str, Any]:
    return {
        "name": name,
        "in": "query",
        "required": False,
        "schema": {"type": kind, **extra},
        "description": description,
    }


def header(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": {"type": "string"}, "description": description}


def path(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "description": description}


def build(app: FastAPI, plain: Iterable[Plain], structs: Iterable[type]) -> dict[str, Any]:
    """The whole document."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
    )
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # FastAPI's own shape; ours is 400 invalid_parameter
    for route in plain:
        operation = {**route.operation, "security": [{"key": []}]}
        document["paths"].setdefault(route.path, {})[route.method.lower()] = operation
    _, components = msgspec.json.schema_components([*structs, ProblemBody, OpenAIErrorBody], ref_template=_REF)
    document["components"]["schemas"] = components
    document["paths"] = dict(sorted(document["paths"].items()))
    return document


def _describe(codes: Iterable[str]) -> str:
    return "\n".join(f"- `{code}`: {CATALOGUE[code].title.lower()}" for code in codes)
