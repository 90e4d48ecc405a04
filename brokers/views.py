"""A job as outsiders see it: over HTTP, and in a webhook. Never the prompt."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from brokers.job import Failure, FinishReason, Job, Kind, Lane, State, Usage


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A token that might have come, in OpenAI's words; `token_id` is an extension of the native routes."""

    token_id: int | UnsetType = UNSET
    token: str  # its text; bytes that are no whole character are escaped
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative, frozen=True, kw_only=True):
    """A token that came, and the best ones in its place. What the model gave, before sampling changed anything."""

    top_logprobs: list[Alternative]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a job that has ended wrote: the text, or the embeddings of its inputs, in order."""

    text: str | UnsetType = UNSET
    embeddings: list[list[float] | str] | UnsetType = UNSET  # numbers, or base64 of little-endian float32
    logprobs: list[TokenLogprob] | UnsetType = UNSET  # of each token, where they were asked for
    finish_reason: FinishReason | None


class Urls(msgspec.Struct, frozen=True, kw_only=True):
    """Where to go on, relative to this server."""

    self: str
    events: str
    cancel: str


class StreamPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The job's Redis stream, and the position to read from."""

    key: str
    after: int = 0


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the API shows it. Times are unix seconds."""

    id: str
    object: str = "job"
    kind: Kind
    status: State
    model: str
    lane: Lane
    region: str
    created_at: float
    start_at: float | UnsetType = UNSET
    expires_at: float
    attempt: int
    position: int  # content in the stream so far: tokens, or inputs
    urls: Urls
    stream: StreamPlace
    metadata: dict[str, str] = {}
    started_at: float | UnsetType = UNSET
    ended_at: float | UnsetType = UNSET
    result: Result | UnsetType = UNSET
    error: Failure | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET


def view(job: Job, stream_key: str, result: Result | None = None) -> JobView:
    here = f"/v1/jobs/{job.id}"
    return JobView(
        id=job.id,
        kind=job.kind,
        status=job.state,
        model=job.model,
        lane=job.lane,
        region=job.home,
        created_at=job.created_ms / 1000,
        start_at=_seconds(job.start_ms),
        expires_at=job.deadline_ms / 1000,
        attempt=job.attempt,
        position=job.pos,
        urls=Urls(self=here, events=f"{here}/events", cancel=f"{here}/cancel"),
        stream=StreamPlace(key=stream_key),
        metadata=job.metadata,
        started_at=_seconds(job.started_ms),
        ended_at=_seconds(job.ended_ms),
        result=result or UNSET,
        error=job.failure or UNSET,
        usage=job.usage or UNSET,
    )


def _seconds(ms: int | None) -> float | UnsetType:
    return UNSET if ms is None else ms / 1000
