"""Clients under faults: they submit jobs over HTTP, read them by SSE, and resume as the documentation tells them to.

Each client submits a job, reads it to its end, and submits the next. Whatever it is told is kept with its time, so
that a checker can compare it with the store and with the text that an uninterrupted run gives. The clients live in a
thread of their own: a test may block while it kills and restarts.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
from httpx_sse import SSEError, aconnect_sse

_PAUSE_S = 0.2  # before a client tries again, unless the server says when
_LONGEST_PAUSE_S = 1.0
_TRANSIENT = frozenset({409, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Work:
    """What a job asks for."""

    prompt: str
    seed: int
    max_tokens: int
    model: str
    greedy: bool = False

    def body(self) -> dict[str, Any]:
        fields = {"model": self.model, "prompt": self.prompt, "seed": self.seed, "max_tokens": self.max_tokens}
        return fields | ({"temperature": 0} if self.greedy else {"ignore_eos": True})


@dataclass(frozen=True)
class Heard:
    """One server-sent event, as the client had it."""

    at: float  # time.monotonic()
    event: str
    pos: int
    data: dict[str, Any]


@dataclass
class Reading:
    """One acknowledged job, and all that its client was told."""

    work: Work
    job_id: str
    events: str  # path
    acknowledged_at: float
    heard: list[Heard] = field(default_factory=list)
    resumes: int = 0
    refusals: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(heard.data["text"] for heard in self.heard if heard.event == "token")

    @property
    def pos(self) -> int:
        return max((heard.pos for heard in self.heard if heard.event == "token"), default=0)

    @property
    def ended(self) -> bool:
        return bool(self.heard) and self.heard[-1].event == "end"

    @property
    def end(self) -> dict[str, Any]:
        return self.heard[-1].data if self.ended else {}

    @property
    def error_codes(self) -> list[str]:
        return [heard.data["code"] for heard in self.heard if heard.event == "error"]

    def first_token_after(self, moment: float) -> float | None:
        return next((heard.at for heard in self.heard if heard.event == "token" and heard.at > moment), None)


@dataclass(frozen=True)
class Answer:
    """One answer to a submission; status 0 is none at all."""

    at: float
    seconds: float
    status: int
    retry_after: bool


@dataclass
class Journal:
    """Everything the clients of one load saw."""

    readings: list[Reading] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def slowest_answer_s(self) -> float:
        return max((answer.seconds for answer in self.answers), default=0.0)

    def gaps_after(self, moments: Sequence[float]) -> list[float]:
        """Seconds from the moment of a fault to the next token, for each stream that was taken over after it."""
        gaps = []
        for reading in self.readings:
            for heard in reading.heard:
                if heard.event == "progress" and heard.data["kind"] == "taken_over":
                    fault = max((moment for moment in moments if moment < heard.at), default=None)
                    token = reading.first_token_after(heard.at)
                    if fault is not None and token is not None:
                        gaps.append(token - fault)
        return gaps


def each_once(works: Sequence[Work]) -> Callable[[random.Random], Work | None]:
    """For a load that does these jobs and no more."""
    left = list(works)
    return lambda _: left.pop(0) if left else None


class Load:
    """`clients` at work until `stop`; then every job that was acknowledged is read to its end."""

    def __init__(
        self,
        base_urls: Sequence[str],
        api_key: str,
        make: Callable[[random.Random], Work | None],
        clients: int,
        *,
        patient: bool = False,
        seed: int = 1,
    ) -> None:
        """A client whose `make` gives None goes home. A `patient` one comes back even to a job that is not found."""
        self.journal = Journal()
        self._patient = patient
        self._base_urls = list(base_urls)
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._make = make
        self._clients = clients
        self._random = random.Random(seed)
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    @property
    def idle(self) -> bool:
        """Whether every client has gone home."""
        return not self._thread.is_alive()

    def finish(self, timeout_s: float = 60.0) -> Journal:
        """Wait until every client has gone home."""
        self._thread.join(timeout_s)
        return self.stop(timeout_s=1.0)

    def stop(self, timeout_s: float = 60.0) -> Journal:
        """No new jobs; wait for the ends of those there are. Raises what a client raised."""
        self._stopping = True
        self._thread.join(timeout_s)
        if self._failure:
            raise self._failure
        if self._thread.is_alive():
            open_ones = [reading.job_id for reading in self.journal.readings if not reading.ended]
            raise AssertionError(f"{len(open_ones)} jobs have not ended {timeout_s:.0f} s later: {open_ones[:5]}")
        return self.journal

    def flowing(self, within_s: float = 1.0) -> int:
        """How many streams that have not ended brought a token just now."""
        since = time.monotonic() - within_s
        return sum(1 for reading in list(self.journal.readings) if _flows(reading, since))

    def wait_flowing(self, count: int, timeout_s: float) -> float:
        """Seconds until that many streams flow at once."""
        began = time.monotonic()
        while self.flowing() < count:
            if self._failure:
                raise self._failure
            if time.monotonic() - began > timeout_s:
                raise AssertionError(f"{self.flowing()} of {count} streams flow after {timeout_s:.0f} s")
            time.sleep(0.05)
        return time.monotonic() - began

    def wait_taken_over(self, since: float, timeout_s: float = 15.0) -> None:
        """Until some stream has been taken over since then."""
        while not self.taken_over(since):
            assert time.monotonic() - since < timeout_s, "nobody took a stream over"
            time.sleep(0.05)

    def taken_over(self, since: float) -> int:
        """How many streams another worker has taken over since then."""
        return sum(
            any(heard.at > since and heard.data.get("kind") == "taken_over" for heard in reading.heard)
            for reading in list(self.journal.readings)
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        if kind is not None:
            self._thread.join(1.0)

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 (told by stop, in the test's thread)
            self._failure = error

    async def _main(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client())

    async def _client(self) -> None:
        limits = httpx.Timeout(5.0, read=20.0)
        async with httpx.AsyncClient(headers=self._headers, timeout=limits, trust_env=False) as http:
            while not self._stopping and (work := self._make(self._random)):
                if reading := await self._submit(http, work):
                    self.journal.readings.append(reading)
                    await self._read(http, reading)

    async def _submit(self, http: httpx.AsyncClient, work: Work) -> Reading | None:
        """The job once it is acknowledged. The same Idempotency-Key goes with every try."""
        key = secrets.token_hex(8)
        while not self._stopping:
            began = time.monotonic()
            answer = await self._post(http, work, key)
            now = time.monotonic()
            status = answer.status_code if answer else 0
            told_when = answer.headers.get("Retry-After") if answer else None
            self.journal.answers.append(Answer(now, now - began, status, bool(told_when)))
            if answer is not None and status in {200, 202}:
                job = answer.json()
                return Reading(work, job["id"], job["urls"]["events"], now)
            if answer is not None and status not in _TRANSIENT:
                raise AssertionError(f"a submission was answered {status}: {answer.text}")
            await asyncio.sleep(min(float(told_when or _PAUSE_S), _LONGEST_PAUSE_S))
        return None

    async def _post(self, http: httpx.AsyncClient, work: Work, key: str) -> httpx.Response | None:
        try:
            return await http.post(self._url() + "/v1/jobs", json=work.body(), headers={"Idempotency-Key": key})
        except httpx.TransportError:
            return None

    async def _read(self, http: httpx.AsyncClient, reading: Reading) -> None:
        last = ""
        while True:
            last = await self._follow(http, reading, last)
            if reading.ended:
                return
            reading.resumes += 1
            await asyncio.sleep(_PAUSE_S)

    async def _follow(self, http: httpx.AsyncClient, reading: Reading, last: str) -> str:
        """Read until the connection ends; the id to go on from."""
        headers = {"Last-Event-ID": last} if last else {}
        try:
            async with aconnect_sse(http, "GET", self._url() + reading.events, headers=headers) as source:
                if source.response.status_code != 200:
                    body = (await source.response.aread()).decode()
                    reading.refusals.append(f"{source.response.status_code} {body[:300]}")
                    if not self._patient:
                        _check_transient(reading, source.response.status_code)
                    return last
                async for event in source.aiter_sse():
                    last = event.id or last
                    data = event.json()
                    reading.heard.append(Heard(time.monotonic(), event.event, int(data.get("pos", 0)), data))
        except (httpx.TransportError, SSEError):
            pass
        return last

    def _url(self) -> str:
        return self._random.choice(self._base_urls)


def _flows(reading: Reading, since: float) -> bool:
    if reading.ended:
        return False
    return any(heard.at > since for heard in reversed(reading.heard[-3:]) if heard.event == "token")


def _check_transient(reading: Reading, status: int) -> None:
    if status not in _TRANSIENT:
        raise AssertionError(f"job {reading.job_id}: its reader was told {reading.refusals[-1]}")
