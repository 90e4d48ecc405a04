"""The engine's loop: schedule, run, postprocess. It knows neither text nor tensors.

`BatchEngine` is everything an engine does apart from its model; a `BatchModel` turns a plan into tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from workers.engine import checks
from workers.engine.fault import Fault
from workers.engine.preparing import Prepared, Preparing
from workers.engine.protocol import Capabilities, Output, Request, Stats, TokenLogprobs
from workers.engine.scheduler import Plan, Scheduler
from workers.engine.sequence import Sequence
from workers.engine.speculation import Costs, Speculation

if TYPE_CHECKING:
    from workers.engine.guide import GuideMaker


class Drawn(NamedTuple):
    """A sequence's next token, or why it has none. Of one step a sequence may have several, in order."""

    sequence: Sequence
    token: int | Fault
    logprobs: TokenLogprobs | None = None  # where they were asked for


class BatchModel(Protocol):
    """A model that advances many sequences at once."""

    name: str  # of its engine, as in a model's card
    max_context: int
    vocab_size: int
    costs: Costs | None  # of a step; None where they are not known
    guesses: bool  # it is to be given drafts where that pays
    joins: bool  # one pass over its weights takes decoding sequences and prompts
    exact: bool  # what it draws for a sequence depends on nothing but the sequence
    prefill_chunk: int  # prompt tokens in one step; as many as decoding sequences may be kept waiting for

    def row_length(self, tokens: int) -> int:
        """How many tokens of the KV budget a sequence takes that has so many."""

    def run(self, plan: Plan) -> list[Drawn]:
        """Feed the plan's tokens; a token (or a fault) for each decoding sequence and each completed prompt, and one
        more for each token of a draft that is what was drawn there."""


class BatchEngine:
    """Continuous batching over any BatchModel. One thread owns it."""

    def __init__(
        self,
        model: BatchModel,
        *,
        slots: int,
        kv_tokens: int,
        prefix_tokens: int = 0,
        pause_grace_s: float = 0.0,
        eos_ids: Collection[int] = (),
        guides: GuideMaker | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._model = model
        self._preparing = Preparing(guides)
        self._guided = guides is not None
        self._eos_ids = frozenset(eos_ids)
        self._clock = clock
        self._max_context = min(model.max_context, kv_tokens)  # one sequence alone must fit into the cache
        guessing = Speculation(model.costs, self._max_context) if model.costs and model.guesses else None
        costs = model.costs if model.joins else None
        self._scheduler = Scheduler(slots, kv_tokens, model.prefill_chunk, prefix_tokens, guessing, costs)
        self._pause_grace_s = pause_grace_s
        self._grace: dict[str, float] = {}  # until when what is kept of paused sequences is held
        self._ended: list[Output] = []  # ends that happened between two steps
        self.on_begin: Callable[[list[str]], None] = lambda _: None
        self.ready_fd: int | None = self._preparing.ready_fd
        self._prefix_cache = prefix_tokens > 0
        self._steps = self._generated = self._prefilled = self._guessed = self._confirmed = 0
        self._last_token: float | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            pause=True,
            keyed_sampling=True,
            max_context=self._max_context,
            vocab_size=self._model.vocab_size,
            exact=self._model.exact,
            prefix_cache=self._prefix_cache,
            json_schema=self._guided,
            engine=self._model.name,
        )

    def submit(self, request: Request) -> None:
        live = request.seq in self._scheduler or request.seq in self._preparing
        end = checks.refused(request, self.capabilities, live=live) or checks.already_over(request, self.capabilities)
        if end is not None:
            self._ended.append(end)
        elif not self._preparing.add(request):
            self._scheduler.add(request, self._need(request))

    def abort(self, seq: str) -> None:
        if self._remove(seq):
            self._ended.append(Output(seq, finish="cancelled"))

    def pause(self, seq: str) -> None:
        self._scheduler.pause(seq)
        self._grace[seq] = self._clock() + self._pause_grace_s
        self._preparing.pause(seq, paused=True)

    def resume(self, seq: str) -> None:
        self._scheduler.resume(seq)
        self._preparing.pause(seq, paused=False)

    def step(self) -> list[Output]:
        self._expire()
        self._let_go()
        for prepared in self._preparing.take():
            self._begin(prepared)
        plan = self._scheduler.schedule()
        if begun := [chunk.sequence.request.seq for chunk in plan.prefill if not chunk.sequence.entered]:
            self.on_begin(begun)
        ran = self._model.run(plan) if plan else []
        drawn = [list(each) for _, each in groupby(ran, attrgetter("sequence"))]
        # All of it before the first sequence ends: whose row is moved then is moved with what it holds now.
        self._scheduler.advance(
            plan,
            right=[one.sequence for each in drawn for one in each[1:]],
            failed=[one.sequence for one in ran if isinstance(one.token, Fault)],
        )
        return self._postprocess(plan, drawn)

    @property
    def idle(self) -> bool:
        busy = self._ended or self._scheduler.running or self._scheduler.waiting or self._preparing.has_ready
        return not busy and not any(True for _ in self._overdue())

    def stats(self) -> Stats:
        scheduler = self._scheduler
        return Stats(
            slots=scheduler.slots,
            running=scheduler.running,
            waiting=scheduler.waiting + len(self._preparing),
            paused=scheduler.paused,
            kv_tokens_used=scheduler.kv_tokens_used,
            kv_tokens_total=scheduler.kv_tokens,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            preempted=scheduler.preempted,
            reused_tokens=scheduler.reused_tokens,
            guessed_tokens=self._guessed,
            confirmed_tokens=self._confirmed,
            steps=self._steps,
            last_token_age_s=None if self._last_token is None else self._clock() - self._last_token,
        )

    def _need(self, request: Request) -> int:
        tokens = min(len(request.prompt) + request.sampling.max_tokens, self._max_context)
        return min(self._model.row_length(tokens), self._scheduler.kv_tokens)

    def _begin(self, prepared: Prepared) -> None:
        """Let a sequence with a guide go on, unless that says no."""
        request = prepared.request
        try:
            guide = prepared.guide.result()
        except Fault as fault:
            self._ended.append(checks.failed(request.seq, fault.code, fault.message))
            return
        if guide.finished:
            self._ended.append(Output(request.seq, finish="stop"))
            return
        self._scheduler.add(request, self._need(request), guide)
        if prepared.paused:
            self._scheduler.pause(request.seq)

    def _remove(self, seq: str) -> bool:
        return self._scheduler.remove(seq) or self._preparing.remove(seq)

    def _overdue(self) -> list[Request]:
        now = self._clock()
        requests = (*(sequence.request for sequence in self._scheduler), *self._preparing)
        return [request for request in requests if request.deadline is not None and request.deadline <= now]

    def _expire(self) -> None:
        for request in self._overdue():
            self._remove(request.seq)
            self._ended.append(Output(request.seq, finish="expired"))

    def _let_go(self) -> None:
        now = self._clock()
        for seq in [seq for seq, until in self._grace.items() if until <= now]:
            del self._grace[seq]
            self._scheduler.let_go(seq)

    def _postprocess(self, plan: Plan, drawn: list[list[Drawn]]) -> list[Output]:
        outputs, self._ended = self._ended, []
        outputs += map(self._settle, drawn)
        self._steps += bool(plan)
        self._prefilled += sum(chunk.length for chunk in plan.prefill)
        self._guessed += sum(map(len, plan.drafts))
        if drawn:
            self._last_token = self._clock()
        return outputs

    def _settle(self, drawn: list[Drawn]) -> Output:
        """Append what was drawn to its sequence, and end the sequence where that is due; nothing counts behind that."""
        sequence = drawn[0].sequence
        count, end = len(sequence.output), Output(sequence.request.seq)
        for each in drawn:
            end = self._take(sequence, each.token)
            if end.finish:
                self._scheduler.remove(end.seq, healthy=end.finish != "error")
                break
        tokens = tuple(sequence.output[count:])
        self._generated += len(tokens)
        self._confirmed += max(0, len(tokens) - 1)
        logprobs = tuple(each.logprobs for each in drawn[: len(tokens)] if each.logprobs)
        return msgspec.structs.replace(end, tokens=tokens, logprobs=logprobs)

    def _take(self, sequence: Sequence, token: int | Fault) -> Output:
        """Append a token to its sequence; how that ends with it, if it does."""
        seq = sequence.request.seq
        if isinstance(token, Fault):
            return checks.failed(seq, token.code, token.message)
        if self._stops_at(token, sequence):
            return Output(seq, finish="stop")
        try:
            if sequence.guide:
                sequence.guide.advance(token)
        except Fault as fault:
            return checks.failed(seq, fault.code, fault.message)
        sequence.output.append(token)
        met = sequence.guide is not None and sequence.guide.finished
        full = len(sequence.output) >= sequence.request.sampling.max_tokens or sequence.total >= self._max_context
        return Output(seq, finish="stop" if met else "length" if full else None)

    def _stops_at(self, token: int, sequence: Sequence) -> bool:
        sampling = sequence.request.sampling
        if token in self._eos_ids:
            return sequence.guide is not None or not sampling.ignore_eos or token in sampling.stop_token_ids
        return token in sampling.stop_token_ids
