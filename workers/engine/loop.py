"""The engine's loop: schedule, run, postprocess. It knows neither text nor tensors.

`BatchEngine` is everything an engine does apart from its model; a `BatchModel` turns a plan into tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from workers.engine.protocol import Capabilities, Output, Request, Stats
from workers.engine.scheduler import Plan, Scheduler
from workers.engine.sequence import Sequence


@dataclass(slots=True, frozen=True)
class Fault:
    """Why one sequence of a step has no token; the others are fine."""

    code: str
    message: str


Drawn = tuple[Sequence, int | Fault]


class BatchModel(Protocol):
    """A model that advances many sequences at once."""

    max_context: int
    vocab_size: int
    exact: bool  # what it draws for a sequence depends on nothing but the sequence
    prefill_chunk: int  # prompt tokens in one step; as many as decoding sequences may be kept waiting for

    def run(self, plan: Plan) -> list[Drawn]:
        """Feed the plan's tokens; a token (or a fault) for each decoding sequence and each completed prompt."""


class BatchEngine:
    """Continuous batching over any BatchModel. One thread owns it."""

    def __init__(
        self,
        model: BatchModel,
        *,
        slots: int,
        kv_tokens: int,
        prefix_tokens: int = 0,
        eos_ids: Collection[int] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._model = model
        self._scheduler = Scheduler(slots, kv_tokens, model.prefill_chunk, prefix_tokens)
        self._eos_ids = frozenset(eos_ids)
        self._clock = clock
        self._max_context = min(model.max_context, kv_tokens)  # one sequence alone must fit into the cache
        self._ended: list[Output] = []  # ends that happened between two steps
        self.on_begin: Callable[[list[str]], None] = lambda _: None
        self._steps = self._generated = self._prefilled = 0
        self._last_token: float | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            pause=True,
            keyed_sampling=True,
            max_context=self._max_context,
            vocab_size=self._model.vocab_size,
            exact=self._model.exact,
        )

    def submit(self, request: Request) -> None:
        end = self._refusal(request) or self._already_over(request)
        if end is not None:
            self._ended.append(end)
        else:
            need = min(len(request.prompt) + request.sampling.max_tokens, self._max_context)
            self._scheduler.add(request, need)

    def abort(self, seq: str) -> None:
        if self._scheduler.remove(seq):
            self._ended.append(Output(seq, finish="cancelled"))

    def pause(self, seq: str) -> None:
        self._scheduler.pause(seq)

    def resume(self, seq: str) -> None:
        self._scheduler.resume(seq)

    def step(self) -> list[Output]:
        self._expire()
        plan = self._scheduler.schedule()
        if begun := [chunk.sequence.request.seq for chunk in plan.prefill if not chunk.sequence.entered]:
            self.on_begin(begun)
        drawn = self._model.run(plan) if plan else []
        self._scheduler.advance(plan)
        return self._postprocess(plan, drawn)

    @property
    def idle(self) -> bool:
        busy = self._ended or self._scheduler.running or self._scheduler.waiting
        return not busy and not any(True for _ in self._overdue())

    def stats(self) -> Stats:
        scheduler = self._scheduler
        return Stats(
            slots=scheduler.slots,
            running=scheduler.running,
            waiting=scheduler.waiting,
            paused=scheduler.paused,
            kv_tokens_used=scheduler.kv_tokens_used,
            kv_tokens_total=scheduler.kv_tokens,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            preempted=scheduler.preempted,
            reused_tokens=scheduler.reused_tokens,
            steps=self._steps,
            last_token_age_s=None if self._last_token is None else self._clock() - self._last_token,
        )

    def _refusal(self, request: Request) -> Output | None:
        if request.seq in self._scheduler:
            return _error(request.seq, Fault("duplicate_sequence", "a live sequence has this id"))
        if not request.prompt:
            return _error(request.seq, Fault("empty_prompt", "the prompt has no tokens"))
        vocab = range(self._model.vocab_size)
        if not all(token in vocab for token in (*request.prompt, *request.output)):
            return _error(request.seq, Fault("bad_token", f"a token id is not in 0..{len(vocab) - 1}"))
        if len(request.prompt) >= self._max_context:
            return _error(request.seq, Fault("context_exceeded", f"the prompt fills all {self._max_context} tokens"))
        return None

    def _already_over(self, request: Request) -> Output | None:
        # What was taken over may have ended on its last token, without anyone having said so.
        full = len(request.prompt) + len(request.output) >= self._max_context
        over = full or len(request.output) >= request.sampling.max_tokens
        return Output(request.seq, finish="length") if over else None

    def _overdue(self) -> list[Sequence]:
        now = self._clock()
        return [s for s in self._scheduler if s.request.deadline is not None and s.request.deadline <= now]

    def _expire(self) -> None:
        for sequence in self._overdue():
            self._scheduler.remove(sequence.request.seq)
            self._ended.append(Output(sequence.request.seq, finish="expired"))

    def _postprocess(self, plan: Plan, drawn: list[Drawn]) -> list[Output]:
        outputs, self._ended = self._ended, []
        outputs += [self._settle(sequence, token) for sequence, token in drawn]
        self._steps += bool(plan)
        self._prefilled += sum(chunk.length for chunk in plan.prefill)
        if drawn:
            self._generated += len(drawn)
            self._last_token = self._clock()
        return outputs

    def _settle(self, sequence: Sequence, token: int | Fault) -> Output:
        """Append one token to its sequence, and end the sequence where that is due."""
        seq, sampling = sequence.request.seq, sequence.request.sampling
        if isinstance(token, Fault):
            self._scheduler.remove(seq, healthy=False)
            return _error(seq, token)
        if token in self._eos_ids and not sampling.ignore_eos:
            self._scheduler.remove(seq)
            return Output(seq, finish="stop")
        sequence.output.append(token)
        if len(sequence.output) < sampling.max_tokens and sequence.total < self._max_context:
            return Output(seq, (token,))
        self._scheduler.remove(seq)
        return Output(seq, (token,), finish="length")


def _error(seq: str, fault: Fault) -> Output:
    return Output(seq, finish="error", error_code=fault.code, error=fault.message)
