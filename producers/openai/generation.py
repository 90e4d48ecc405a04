"""A request of OpenAI's answered by jobs: one job a choice, whole or as a stream.

A reader that goes away takes its jobs with it, `reader_grace_s` later, unless its request has an Idempotency-Key: then
others may be reading them, and it may come back for them. A stream that breaks ends in an error frame and
without [DONE], so that it never looks finished.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from brokers.errors import LingbotError
from brokers.job import Content, Entry, Job, State, Usage
from producers import problems, sse
from producers.attendance import GoingAway, ReaderGone, attended, cancel_after_grace
from producers.idempotency import REPLAYED
from producers.openai.replies import Shape, total
from producers.platform import Platform
from producers.problems import Problem
from producers.replies import reply
from producers.submission import cancel_all
from producers.tails import Tails, is_end
from producers.texts import End, Text, end_of

_NO_RETRY = {"x-should-retry": "false"}  # the openai client would send a finished failure again, twice


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of one request, and how their text is worded."""

    platform: Platform
    jobs: list[Job]  # job i is choice i
    choices_per_prompt: int
    shape: Shape
    include_usage: bool = False
    keyed: bool = False  # the request has an Idempotency-Key
    replayed: bool = False  # and is not the first with it

    @property
    def headers(self) -> dict[str, str]:
        jobs = {"X-Lingbot-Jobs": ",".join(job.id for job in self.jobs)}
        return jobs | (REPLAYED if self.replayed else {})

    def abandon(self, *, grace: bool = False) -> None:
        """Nobody reads on: the jobs need not either."""
        if not self.keyed:
            self.platform.later((cancel_after_grace if grace else cancel_all)(self.platform, self.jobs))


async def whole(request: Request, generation: Generation) -> Response:
    """The answer once every job has ended."""
    platform = generation.platform
    try:
        texts = await attended(_read_all(generation), request.receive, platform)
    except ReaderGone:
        generation.abandon(grace=True)
        raise
    except (GoingAway, LingbotError, Problem) as error:
        generation.abandon()
        if isinstance(error, GoingAway):
            raise Problem("shutting_down", "this server ends before the answer is whole") from None
        raise
    usage = total([end.usage for _, end in texts], generation.choices_per_prompt)
    answer = generation.shape.whole([(text, end.finish_reason) for text, end in texts], usage)
    return reply(answer, headers=generation.headers)


async def stream(request: Request, generation: Generation) -> Response:
    """The answer as it comes."""
    platform = generation.platform
    tails = await _tails(generation)
    going = problems.openai_body(Problem("shutting_down", "this server is going away"), request.scope["request_id"])
    return sse.EventStream(
        tails,
        _frames(generation, tails, request.scope["request_id"]),
        platform,
        farewell=sse.data(going),
        on_cut=lambda: generation.abandon(grace=True),
        headers=generation.headers,
    )


async def _read_all(generation: Generation) -> list[tuple[str, End]]:
    """Text and end of every choice. Raises Problem as soon as one of them is no answer."""
    texts = [Text() for _ in generation.jobs]
    tails = await _tails(generation)
    try:
        while not tails.ended:
            for index, entry in await tails.take(generation.platform.settings.heartbeat_s):
                texts[index].add(entry)
                if is_end(entry):
                    _succeeded(end_of(entry))
    finally:
        await tails.close()
    return [(text.result.text, text.end) for text in texts if text.end]


async def _tails(generation: Generation) -> Tails:
    home = await generation.platform.home(generation.jobs[0].id)
    tails = Tails([home.reader.tail_batches(job) for job in generation.jobs])
    await tails.open()
    return tails


async def _frames(generation: Generation, tails: Tails, request_id: str) -> AsyncIterator[bytes]:
    shape, platform = generation.shape, generation.platform
    usages: dict[int, Usage] = {}
    openings = [shape.opening(index) for index in range(len(generation.jobs))]
    try:
        yield b"".join(sse.data(chunk) for chunk in openings if chunk) or sse.HEARTBEAT
        while not tails.ended:
            ready = await tails.take(platform.settings.heartbeat_s)
            yield b"".join(_frame(shape, usages, index, entry) for index, entry in ready) or sse.HEARTBEAT
        yield _last_frames(generation, usages)
    except (LingbotError, Problem) as error:
        generation.abandon()
        problem = error if isinstance(error, Problem) else problems.of(error)
        yield sse.data(problems.openai_body(problem, request_id))


def _frame(shape: Shape, usages: dict[int, Usage], index: int, entry: Entry) -> bytes:
    """Raises Problem at the end of a job that failed, and for a text that changed under its reader."""
    if isinstance(entry, Content):
        return sse.data(shape.text(index, entry.text)) if entry.text else b""
    if is_end(entry):
        end = _succeeded(end_of(entry))
        usages[index] = end.usage
        return sse.data(shape.finish(index, end.finish_reason))
    if entry.kind == "restarted":
        raise Problem("restarted", "the text so far was lost and generated again, differently")
    return b""


def _last_frames(generation: Generation, usages: dict[int, Usage]) -> bytes:
    if not generation.include_usage:
        return sse.DONE
    usage = total([usages[index] for index in range(len(generation.jobs))], generation.choices_per_prompt)
    return sse.data(generation.shape.usage(usage)) + sse.DONE


def _succeeded(end: End) -> End:
    """Raises Problem for an end that is no answer."""
    match end.status:
        case State.SUCCEEDED:
            return end
        case State.CANCELLED:
            raise Problem("job_cancelled", "the job was cancelled", headers=_NO_RETRY)
        case State.EXPIRED:
            raise Problem("job_expired", "the job's deadline passed before it ended", headers=_NO_RETRY)
        case _:
            why = (end.error or {}).get("message") or "the engine gave no reason"
            raise Problem("generation_failed", f"the generation failed: {why}", headers=_NO_RETRY)
