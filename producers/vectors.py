"""Vectors as JSON shows them: as floats, or in base64 as little-endian float32."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from enum import StrEnum

from starlette.requests import Request

from producers.problems import Problem

_INLINE_NUMBERS = 16_384  # more are worded in a thread (about 2 ms of event loop at this size)
_DIGITS = 9  # significant ones that tell every float32 from its neighbours
_EXACT_POWER = 22  # of ten, which a float64 is up to here

ENCODING = "How embeddings are worded: `float`, or `base64` of little-endian float32"

Embedding = list[float] | str


class Encoding(StrEnum):
    """How a vector is worded."""

    FLOAT = "float"
    BASE64 = "base64"


def encoded(vectors: Sequence[bytes], encoding: Encoding) -> list[Embedding]:
    """Each vector as JSON will show it."""
    if encoding is Encoding.BASE64:
        return [base64.b64encode(vector).decode() for vector in vectors]
    return _floats(vectors)


def encoding_asked(request: Request) -> Encoding:
    """The query's `encoding_format`. Raises Problem."""
    asked = request.query_params.get("encoding_format") or Encoding.FLOAT
    if asked not in set(Encoding):
        raise Problem("invalid_parameter", "encoding_format: float or base64", param="encoding_format")
    return Encoding(asked)


async def encode(vectors: Sequence[bytes], encoding: Encoding) -> list[Embedding]:
    """As `encoded`, without holding up the event loop."""
    if sum(map(len, vectors)) // 4 <= _INLINE_NUMBERS:
        return encoded(vectors, encoding)
    return await asyncio.to_thread(encoded, vectors, encoding)


def _floats(vectors: Sequence[bytes]) -> list[Embedding]:
    """A float32 written as the float64 it is has seventeen digits; nine of them mean the same float32."""
    if not vectors:
        return []
    import numpy as np

    exact = np.frombuffer(b"".join(vectors), dtype="<f4").astype(np.float64)
    magnitude = np.floor(np.log10(np.abs(exact), where=exact != 0, out=np.zeros_like(exact)))
    scale = 10.0 ** np.minimum(_DIGITS - 1 - magnitude, _EXACT_POWER)
    short = np.where(magnitude >= _DIGITS - 1 - _EXACT_POWER, np.round(exact * scale) / scale, exact)
    return list(short.reshape(len(vectors), -1).tolist())
