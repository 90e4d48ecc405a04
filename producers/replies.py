"""Answers as JSON, by msgspec."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder()


def reply(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encoder.encode(value), status, headers, "application/json")
