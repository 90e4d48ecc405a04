"""A job's stream as server-sent events, resumable at any position."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from brokers import entries
from brokers.errors import LingbotError
from brokers.job import Content, Control, Entry, Job
from brokers.views import TokenLogprob
from producers import problems, sse
from producers.auth import Right, authorize
from producers.documents import Plain, answer, failures, header, path, query
from producers.limits import FIRST_LOOK_S
from producers.platform import platform_of
from producers.problems import Problem
from producers.scores import scores, worded
from producers.tails import Tails, is_end
from producers.texts import Wording
from producers.vectors import ENCODING, Embedding, Encoding, encoded, encoding_asked

_CURSOR = re.compile(r"\d{1,15}\Z", re.ASCII)
_INDEX = 0  # native jobs have one choice


class EmbeddingData(msgspec.Struct, frozen=True):
    """Event `embedding`: the vectors of inputs `start` + 1 to `pos`, which is also the event's id."""

    pos: int
    start: int
    embeddings: list[Embedding]
    index: int = _INDEX


class TokenData(msgspec.Struct, frozen=True):
    """Event `token`: text up to and including position `pos`, which is also the event's id."""

    pos: int
    text: str
    index: int = _INDEX
    logprobs: list[TokenLogprob] | UnsetType = UNSET  # of each token, where they were asked for


async def stream_events(request: Request) -> sse.EventStream:
    platform = platform_of(request)
    principal = await authorize(request, Right.READ)
    job_id = request.path_params["job_id"]
    after, encoding = _cursor(request), encoding_asked(request)
    job = await platform.job(principal, job_id)
    _check_reach(job, after)
    home, how = await platform.home(job_id), Wording(encoding, platform.registry.spelling(job.model))
    tails = Tails([home.reader.tail_batches(job, after)])
    await tails.open()
    try:
        first = await tails.take(FIRST_LOOK_S)  # a stream that is gone is a 410, not a 200 that breaks
    except BaseException:
        await tails.close()
        raise
    return sse.EventStream(tails, _frames(tails, first, platform.settings.heartbeat_s, how), platform)


async def _frames(
    tails: Tails, ready: list[tuple[int, Entry]], heartbeat_s: float, how: Wording
) -> AsyncIterator[bytes]:
    """Chunks of frames; everything that is ready goes in one."""
    try:
        yield sse.RETRY + b"".join(_frame(entry, how) for _, entry in ready)
        while not tails.ended:
            ready = await tails.take(heartbeat_s)
            yield b"".join(_frame(entry, how) for _, entry in ready) or sse.HEARTBEAT
    except LingbotError as error:
        problem = problems.of(error)
        yield sse.event("error", {"code": problem.code, "message": problem.detail, "index": _INDEX})


def _frame(entry: Entry, how: Wording) -> bytes:
    if isinstance(entry, Content) and entry.vectors:
        embeddings = encoded(entries.split(entry), how.encoding)
        return sse.event("embedding", EmbeddingData(entry.pos, entry.start, embeddings), cursor=entry.pos)
    if isinstance(entry, Content):
        logprobs = worded(scores(entry, 0), how.spelling, with_ids=True) if entry.logprobs else UNSET
        return sse.event("token", TokenData(entry.pos, entry.text, logprobs=logprobs), cursor=entry.pos)
    if is_end(entry):
        return _end(entry)
    # Other control entries leave the cursor; after a restart the client's is of a text that is no more.
    cursor = entry.pos if entry.kind == "restarted" else None
    return sse.event("progress", {"pos": entry.pos, "index": _INDEX, "kind": entry.kind, **entry.data}, cursor)


def _end(entry: Control) -> bytes:
    """The terminal event, after an `error` when there was one. It carries an id, so that a resume from it is told
    the end again rather than nothing."""
    data: dict[str, Any] = {"pos": entry.pos, "index": _INDEX, **entry.data}
    end = sse.event("end", data, cursor=entry.pos)
    if not (error := entry.data.get("error")):
        return end
    return sse.event("error", {"pos": entry.pos, "index": _INDEX, **error}) + end


def _cursor(request: Request) -> int:
    """The position to go on after. Last-Event-ID wins: a reconnecting EventSource keeps the `after` of its URL."""
    given = {"Last-Event-ID": request.headers.get("last-event-id"), "after": request.query_params.get("after")}
    after = 0
    for name in ("after", "Last-Event-ID"):
        value = given[name]
        if not value:  # an EventSource that has read no id sends none, or an empty one
            continue
        if not _CURSOR.match(value):
            raise Problem("bad_cursor", f"{name} is no position: {value[:40]!r}", param=name)
        after = int(value)
    return after


def _check_reach(job: Job, after: int) -> None:
    # Of a job that has ended nothing more can come. One that lives may have lost text that its reader has, and will
    # pass that again.
    if after > job.pos and job.ended:
        raise Problem(
            "bad_cursor",
            f"the stream stands at position {job.pos}, before {after}",
            hint=f"Read on from {job.pos}, or from 0.",
        )


PLAIN = (
    Plain(
        "GET",
        "/v1/jobs/{job_id}/events",
        stream_events,
        {
            "tags": ["jobs"],
            "operationId": "stream_events",
            "summary": "Stream Events",
            "description": "What the job writes, as it comes. Events: of a text `token` `{pos, text, index}`, "
            "with `logprobs` where they were asked for, of an "
            "embedding job `embedding` `{pos, start, embeddings, index}`, and of both `progress` `{pos, kind, index, "
            "...}`, `error` `{code, message, index}`, and last `end` `{pos, status, finish_reason, usage, digest, "
            "index}`. The id of an event is its position: send it as `Last-Event-ID` or `?after=` to go on "
            "from there, on any server. Close the connection on `end`; an EventSource would connect again.",
            "parameters": [
                path("job_id", "The job's id"),
                query("after", "integer", "Go on after this position", minimum=0),
                query("encoding_format", "string", ENCODING, enum=list(Encoding)),
                header("Last-Event-ID", "As `after`, and wins over it"),
            ],
            "responses": {
                200: answer("The events", TokenData, "text/event-stream"),
                **failures("job_not_found", "bad_cursor", "stream_gone", "stream_gap"),
            },
        },
    ),
)
STRUCTS = (TokenData, EmbeddingData)
