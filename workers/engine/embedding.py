"""The loop of an embedding engine: pack, run, release. It knows neither text nor tensors.

`EmbeddingEngine` is everything it does apart from its model; an `Encoder` turns a batch of inputs into vectors. Unlike
a text, a job has no state between two steps but the vectors it holds until those before them are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from workers.engine.fault import Fault
from workers.engine.packing import Item, Job, Packer
from workers.engine.protocol import Capabilities, EmbedRequest, Output, Stats, Tokens

_WINDOW = 512  # inputs that a job offers at once; more of them make fuller batches
_WINDOW_BYTES = 4 << 20  # of vectors that a job may hold back


class Encoder(Protocol):
    """A model that makes a vector of each input."""

    max_input: int  # tokens
    vocab_size: int
    dimensions: int
    budget: int  # tokens of a batch, padding included: where larger ones are not faster, and a step is still short

    def run(self, inputs: list[Tokens], dimensions: list[int]) -> list[bytes | Fault]:
        """A vector (little-endian float32) or a fault for each input, cut to so many dimensions (0 is all)."""


class EmbeddingEngine:
    """Dynamic batching over any Encoder. One thread owns it."""

    def __init__(
        self, encoder: Encoder, *, name: str = "", slots: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._encoder = encoder
        self._name = name
        self._slots = slots
        window = max(1, min(_WINDOW, _WINDOW_BYTES // (4 * encoder.dimensions)))
        self._packer = Packer(encoder.budget, window)
        self._clock = clock
        self._ended: list[Output] = []  # ends that happened between two steps
        self.on_begin: Callable[[list[str]], None] = lambda _: None
        self.ready_fd: int | None = None
        self._steps = self._vectors = self._tokens = 0
        self._last_vector: float | None = None

    @property
    def capabilities(self) -> Capabilities:
        encoder = self._encoder
        return Capabilities(
            pause=True,
            keyed_sampling=True,
            max_context=encoder.max_input,
            vocab_size=encoder.vocab_size,
            engine=self._name,
        )

    def submit(self, request: EmbedRequest) -> None:
        fault = self._refusal(request)
        if fault is not None:
            self._ended.append(_error(request.seq, fault))
        elif self._packer.add(request).ended:  # what was taken over may have ended without anyone having said so
            self._end(request.seq, Output(request.seq, finish="stop"))

    def abort(self, seq: str) -> None:
        if seq in self._packer:
            self._end(seq, Output(seq, finish="cancelled"))

    def pause(self, seq: str) -> None:
        self._packer.pause(seq)

    def resume(self, seq: str) -> None:
        self._packer.resume(seq)

    def step(self) -> list[Output]:
        self._expire()
        batch = self._packer.next_batch()
        self._announce(batch)
        vectors = self._run(batch)
        return self._settle(batch, vectors)

    @property
    def idle(self) -> bool:
        return not self._ended and self._packer.idle and not any(True for _ in self._overdue())

    def stats(self) -> Stats:
        jobs = list(self._packer)
        running = sum(job.begun and not job.paused for job in jobs)
        paused = sum(job.paused for job in jobs)
        return Stats(
            slots=self._slots,
            running=running,
            waiting=len(jobs) - running - paused,
            paused=paused,
            kv_tokens_used=0,
            kv_tokens_total=0,
            generated_tokens=self._vectors,
            prefilled_tokens=self._tokens,
            preempted=0,
            reused_tokens=0,
            guessed_tokens=0,
            confirmed_tokens=0,
            steps=self._steps,
            last_token_age_s=None if self._last_vector is None else self._clock() - self._last_vector,
        )

    def _refusal(self, request: EmbedRequest) -> Fault | None:
        encoder = self._encoder
        if request.seq in self._packer:
            return Fault("duplicate_sequence", "a live sequence has this id")
        if not request.inputs or not all(request.inputs):
            return Fault("empty_prompt", "an input has no tokens")
        if any(len(tokens) > encoder.max_input for tokens in request.inputs):
            return Fault("context_exceeded", f"an input has more than {encoder.max_input} tokens")
        if any(not 0 <= token < encoder.vocab_size for tokens in request.inputs for token in tokens):
            return Fault("bad_token", f"a token id is not in 0..{encoder.vocab_size - 1}")
        if not 0 <= request.dimensions <= encoder.dimensions:
            return Fault("invalid_parameter", f"the model's vectors have {encoder.dimensions} dimensions")
        return None

    def _overdue(self) -> Iterable[Job]:
        now = self._clock()
        return (job for job in self._packer if job.request.deadline is not None and job.request.deadline <= now)

    def _expire(self) -> None:
        for job in list(self._overdue()):
            self._end(job.request.seq, Output(job.request.seq, finish="expired"))

    def _end(self, seq: str, output: Output) -> None:
        self._packer.remove(seq)
        self._ended.append(output)

    def _announce(self, batch: list[Item]) -> None:
        fresh = {item.job.request.seq: item.job for item in batch if not item.job.begun}
        for job in fresh.values():
            job.begun = True
        if fresh:
            self.on_begin(list(fresh))

    def _run(self, batch: list[Item]) -> list[bytes | Fault]:
        if not batch:
            return []
        inputs = [item.tokens for item in batch]
        vectors = self._encoder.run(inputs, [item.job.request.dimensions for item in batch])
        self._steps += 1
        self._vectors += len(batch)
        self._tokens += sum(map(len, inputs))
        self._last_vector = self._clock()
        return vectors

    def _settle(self, batch: list[Item], vectors: list[bytes | Fault]) -> list[Output]:
        """Give each job its vectors; what is next in its stream goes out."""
        for item, vector in zip(batch, vectors, strict=True):
            seq = item.job.request.seq
            if not isinstance(vector, Fault):
                item.job.finish(item.place, vector)
            elif seq in self._packer:
                self._end(seq, _error(seq, vector))
        jobs = {item.job.request.seq: item.job for item in batch if item.job.request.seq in self._packer}
        outputs, self._ended = self._ended, []
        return outputs + [output for job in jobs.values() if (output := self._output(job))]

    def _output(self, job: Job) -> Output | None:
        seq, released = job.request.seq, tuple(job.release())
        if job.ended:
            self._packer.remove(seq)
            return Output(seq, vectors=released, finish="stop")
        return Output(seq, vectors=released) if released else None


def _error(seq: str, fault: Fault) -> Output:
    return Output(seq, finish="error", error_code=fault.code, error=fault.message)
