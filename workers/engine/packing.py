"""Which inputs make the next batch: policy without tensors.

A batch is padded to its longest input, so only inputs of about one length share one: lengths fall into buckets whose
width is an eighth to a quarter of the length, so beyond 16 tokens a batch wastes less than a fifth on padding. Its
size is bounded in tokens, so that a step takes about as long whatever is in it, and who comes new waits for one step,
not for a job.

Each batch is led by the job that is next (lanes, tenants and jobs by what they were given, see shares.py), with the
first input that is missing in its stream; the rest is filled with inputs of the same bucket, again in that order. So a
job of 2,048 inputs takes what others leave, and long inputs never hold up short ones of another job for longer than
their own step. A job offers the inputs of a window only: what it has finished beyond a missing one is held meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from workers.engine.protocol import EmbedRequest, Tokens
from workers.engine.shares import Flow

_LANES = {0: 13.0, 1: 2.0}
"""Shares of sixteen, as policy.py has them for texts: the standard lane gets an eighth, the batch lane a sixteenth."""
_LEAST = 1.0
_FINEST = 4  # tokens


def bucket(length: int) -> int:
    """The longest length that may share a batch with this one: the next multiple of an eighth of the power of two at
    or below it."""
    step = max(_FINEST, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


class Job:
    """A request on its way."""

    def __init__(self, request: EmbedRequest, window: int) -> None:
        self.request = request
        self.path: tuple[tuple[Hashable, float], ...] = (
            (request.priority, _LANES.get(request.priority, _LEAST)),
            (request.tenant, request.weight),
            (request.seq, 1.0),
        )
        self.names = tuple(name for name, _ in self.path)
        self.out = request.done  # inputs whose vectors are out: all before this one
        self.paused = False
        self.begun = False
        self._window = window
        self._offered = request.done
        self._buckets: dict[int, deque[int]] = {}
        self._finished: dict[int, bytes] = {}  # by input, beyond a missing one
        self._offer()

    @property
    def ended(self) -> bool:
        return self.out == len(self.request.inputs)

    def first_missing(self) -> int | None:
        """The first input that is offered; None when all of them are being computed, or held."""
        return min((waiting[0] for waiting in self._buckets.values()), default=None)

    def has(self, size: int) -> bool:
        return size in self._buckets

    def take(self, size: int) -> int:
        """The first input of that bucket."""
        waiting = self._buckets[size]
        index = waiting.popleft()
        if not waiting:
            del self._buckets[size]
        return index

    def finish(self, index: int, vector: bytes) -> None:
        self._finished[index] = vector

    def release(self) -> list[bytes]:
        """Vectors that are next in the stream, and have not been released yet."""
        released = []
        while self.out in self._finished:
            released.append(self._finished.pop(self.out))
            self.out += 1
        self._offer()
        return released

    def _offer(self) -> None:
        end = min(len(self.request.inputs), self.out + self._window)
        for index in range(self._offered, end):
            self._buckets.setdefault(bucket(len(self.request.inputs[index])), deque()).append(index)
        self._offered = max(self._offered, end)


class Item(NamedTuple):
    """One input in a batch."""

    job: Job
    place: int  # among its job's inputs

    @property
    def tokens(self) -> Tokens:
        return self.job.request.inputs[self.place]


class Packer:
    """The jobs of one engine. `budget` is the tokens of a batch, padding included; one longer input is one alone."""

    def __init__(self, budget: int, window: int) -> None:
        self._budget = budget
        self._window = window
        self._jobs: dict[str, Job] = {}
        self._shares: Flow[Job] = Flow()

    def __contains__(self, seq: str) -> bool:
        return seq in self._jobs

    def __iter__(self) -> Iterator[Job]:
        return iter(tuple(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, request: EmbedRequest) -> Job:
        job = self._jobs[request.seq] = Job(request, self._window)
        self._shares.add(job.path, job)
        return job

    def remove(self, seq: str) -> bool:
        """Forget a job. False when it is unknown."""
        job = self._jobs.pop(seq, None)
        if job is not None:
            self._shares.remove(job.names)
        return job is not None

    def pause(self, seq: str) -> None:
        """What it has not finished yet is not computed until resume()."""
        job = self._jobs.get(seq)
        if job is not None and not job.paused:
            job.paused = True
            self._shares.remove(job.names)

    def resume(self, seq: str) -> None:
        job = self._jobs.get(seq)
        if job is not None and job.paused:
            job.paused = False
            self._shares.add(job.path, job)

    @property
    def idle(self) -> bool:
        return all(job.paused for job in self._jobs.values())

    def next_batch(self) -> list[Item]:
        """Inputs to compute together; empty when there are none."""
        lead = self._shares.first(lambda job: job.first_missing() is not None)
        first = lead.first_missing() if lead else None
        if lead is None or first is None:
            return []
        size = bucket(len(lead.request.inputs[first]))
        batch = [self._take(lead, size)]
        while (len(batch) + 1) * size <= self._budget and (job := self._shares.first(lambda job: job.has(size))):
            batch.append(self._take(job, size))
        return batch

    def _take(self, job: Job, size: int) -> Item:
        self._shares.charge(job.names, size)
        return Item(job, job.take(size))
