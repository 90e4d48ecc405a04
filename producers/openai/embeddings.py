"""POST /v1/embeddings: what it takes and what it answers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from brokers.job import Usage
from producers.openai.waiting import Waiting, succeeded
from producers.texts import Vectors, read_into
from producers.vectors import Encoding, encode


class EmbeddingRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """POST /v1/embeddings. `input`: a text, texts, token ids, or lists of token ids."""

    model: Annotated[str, Meta(min_length=1, max_length=128)]
    input: str | list[str | int | list[int]]
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1, description="Of each embedding; all when not given")] | None = (
        None
    )
    encoding_format: Encoding | None = None
    user: str | None = None


class EmbeddingObject(msgspec.Struct, frozen=True, kw_only=True):
    """One input's embedding: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The embeddings, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


async def embeddings(waiting: Waiting, body: EmbeddingRequest) -> EmbeddingList:
    """The answer once the job has ended. Raises Problem when that is no answer, StreamGone, StreamGap."""
    (job,) = waiting.jobs
    home = await waiting.platform.home(job.id)
    whole = await read_into(Vectors(), home.reader, job)
    usage = succeeded(whole.end).usage if whole.end else Usage(0, 0)
    worded = await encode(whole.vectors, body.encoding_format or Encoding.FLOAT)
    return EmbeddingList(
        data=[EmbeddingObject(index=index, embedding=embedding) for index, embedding in enumerate(worded)],
        model=job.model,
        usage=EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens),
    )
