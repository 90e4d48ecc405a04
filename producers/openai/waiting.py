"""A request of OpenAI's while it waits for its jobs.

A reader that goes away takes its jobs with it, `reader_grace_s` later, unless its request has an Idempotency-Key: then
others may be reading them, and it may come back for them.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from brokers.errors import LingbotError
from brokers.job import Job, State
from producers.attendance import GoingAway, ReaderGone, attended, cancel_after_grace
from producers.idempotency import REPLAYED
from producers.platform import Platform
from producers.problems import CATALOGUE, Problem
from producers.submission import cancel_all
from producers.texts import End

T = TypeVar("T")

_NO_RETRY = {"x-should-retry": "false"}  # the openai client would send a finished failure again, twice


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of one request."""

    platform: Platform
    jobs: list[Job]
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

    async def result(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """What `work` reads of the jobs, for as long as the client is there."""
        try:
            return await attended(work, request.receive, self.platform)
        except ReaderGone:
            self.abandon(grace=True)
            raise
        except (GoingAway, LingbotError, Problem) as error:
            self.abandon()
            if isinstance(error, GoingAway):
                raise Problem("shutting_down", "this server ends before the answer is whole") from None
            raise


def succeeded(end: End) -> End:
    """Raises Problem for an end that is no answer."""
    match end.status:
        case State.SUCCEEDED:
            return end
        case State.CANCELLED:
            raise Problem("job_cancelled", "the job was cancelled", headers=_NO_RETRY)
        case State.EXPIRED:
            raise Problem("job_expired", "the job's deadline passed before it ended", headers=_NO_RETRY)
        case _:
            error = end.error or {}
            why, code = error.get("message") or "the engine gave no reason", error.get("code", "")
            known = code if code in CATALOGUE else "generation_failed"
            raise Problem(known, f"the generation failed: {why}", headers=_NO_RETRY)
