"""A request of OpenAI's answered by jobs: one job a choice, whole or as a stream.

A stream that breaks ends in an error frame and without [DONE], so that it never looks finished.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from brokers.errors import LingbotError
from brokers.job import Content, Entry, Usage
from producers import problems, sse
from producers.openai.replies import Said, Shape, total
from producers.openai.waiting import Waiting, succeeded
from producers.problems import Problem
from producers.replies import reply
from producers.scores import scores
from producers.tails import Tails, is_end
from producers.texts import End, Text, end_of


class Generation(Waiting, frozen=True, kw_only=True):
    """The jobs of one request, job i for choice i, and how their text is worded."""

    choices_per_prompt: int
    shape: Shape
    include_usage: bool = False


async def whole(request: Request, generation: Generation) -> Response:
    """The answer once every job has ended."""
    texts = await generation.result(request, _read_all(generation))
    usage = total([end.usage for _, end in texts], generation.choices_per_prompt)
    answer = generation.shape.whole([(said, end.finish_reason) for said, end in texts], usage)
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


async def _read_all(generation: Generation) -> list[tuple[Said, End]]:
    """What every choice said, and its end. Raises Problem as soon as one of them is no answer."""
    texts = [Text() for _ in generation.jobs]
    tails = await _tails(generation)
    try:
        while not tails.ended:
            for index, entry in await tails.take(generation.platform.settings.heartbeat_s):
                texts[index].add(entry)
                if is_end(entry):
                    succeeded(end_of(entry))
    finally:
        await tails.close()
    return [(Said(text.text, text.scores), text.end) for text in texts if text.end]


async def _tails(generation: Generation) -> Tails:
    home = await generation.platform.home(generation.jobs[0].id)
    tails = Tails([home.reader.tail_batches(job) for job in generation.jobs])
    await tails.open()
    return tails


async def _frames(generation: Generation, tails: Tails, request_id: str) -> AsyncIterator[bytes]:
    shape, platform = generation.shape, generation.platform
    usages: dict[int, Usage] = {}
    lengths = [0] * len(generation.jobs)  # of the choices' texts so far
    openings = [shape.opening(index) for index in range(len(generation.jobs))]
    try:
        yield b"".join(sse.data(chunk) for chunk in openings if chunk) or sse.HEARTBEAT
        while not tails.ended:
            ready = await tails.take(platform.settings.heartbeat_s)
            yield b"".join(_frame(shape, usages, lengths, index, entry) for index, entry in ready) or sse.HEARTBEAT
        yield _last_frames(generation, usages)
    except (LingbotError, Problem) as error:
        generation.abandon()
        problem = error if isinstance(error, Problem) else problems.of(error)
        yield sse.data(problems.openai_body(problem, request_id))


def _frame(shape: Shape, usages: dict[int, Usage], lengths: list[int], index: int, entry: Entry) -> bytes:
    """Raises Problem at the end of a job that failed, and for a text that changed under its reader."""
    if isinstance(entry, Content):
        said = Said(entry.text, scores(entry, lengths[index]))
        lengths[index] += len(entry.text)
        return sse.data(shape.chunk(index, said)) if said.text or said.scores else b""
    if is_end(entry):
        end = succeeded(end_of(entry))
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
