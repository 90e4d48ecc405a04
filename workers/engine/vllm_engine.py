"""vLLM behind our protocol.

vLLM steps by itself, in processes of its own (vllm_thread.py); step() here takes what it has brought and gives it what
it has room for. It is given `slots` sequences and no more: who waits for a place waits here, under our policy, and the
sequences it has begun are known, should it die of one.

It cannot hold one sequence of its batch back: pause() ends it there, and resume() begins it again from its tokens. So
does who must go for a higher lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from workers.engine import checks, vllm_setup
from workers.engine.policy import Policy
from workers.engine.protocol import Capabilities, Output, Request, Stats
from workers.engine.sequence import Sequence
from workers.engine.vllm_thread import Event, VllmThread
from workers.engine.wire import EngineOptions

if TYPE_CHECKING:
    from workers.engine.build import EngineCard


class VllmGoneError(RuntimeError):
    """vLLM has ended; what it had is to be resubmitted to another."""


class VllmEngine:
    """Sequences on their way through a VllmThread that runs. One thread owns it."""

    def __init__(
        self,
        vllm: VllmThread,
        capabilities: Capabilities,
        options: EngineOptions,
        eos_ids: Collection[int] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.capabilities = capabilities
        self.ready_fd: int | None = vllm.ready_fd
        self.on_begin: Callable[[list[str]], None] = lambda _: None
        self._vllm = vllm
        self._options = options
        self._eos_ids = frozenset(eos_ids)
        self._clock = clock
        self._policy = Policy(options.slots)
        self._all: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: dict[str, Sequence] = {}  # by their keys in vLLM
        self._keys: dict[Sequence, str] = {}
        self._outputs: list[Output] = []
        self._to_admit = False  # who waits or who runs has changed
        self._arrivals = self._starts = self._generated = self._preempted = 0
        self._last_token: float | None = None
        self._busy_since = 0.0  # time.monotonic(): since then vLLM has had something to do

    def submit(self, request: Request) -> None:
        end = (
            checks.refused(request, self.capabilities, live=request.seq in self._all)
            or _unsupported(request)
            or checks.already_over(request, self.capabilities)
        )
        if end is not None:
            self._outputs.append(end)
            return
        need = len(request.prompt) + request.sampling.max_tokens
        sequence = Sequence(request, self._arrivals, need, list(request.output))
        self._arrivals += 1
        self._all[request.seq] = sequence
        self._enqueue(sequence)

    def abort(self, seq: str) -> None:
        if sequence := self._all.get(seq):
            self._end(sequence, Output(seq, finish="cancelled"))

    def pause(self, seq: str) -> None:
        sequence = self._all.get(seq)
        if sequence is not None and not sequence.paused:
            self._vacate(sequence)
            sequence.paused = True

    def resume(self, seq: str) -> None:
        sequence = self._all.get(seq)
        if sequence is not None and sequence.paused:
            sequence.paused = False
            self._enqueue(sequence)

    def step(self) -> list[Output]:
        """What vLLM has brought since the last call. Raises VllmGoneError when it has ended."""
        if self._vllm.dead:
            raise VllmGoneError(self._vllm.dead)
        self._expire()
        for event in self._vllm.take():
            if sequence := self._running.get(event.key):  # else it was dropped meanwhile
                self._settle(sequence, event)
        self._admit()
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def idle(self) -> bool:
        news = self._outputs or self._to_admit or self._vllm.has_events
        return not news and not any(map(self._is_overdue, self._all.values()))

    def stats(self) -> Stats:
        progress, running = self._vllm.progress, len(self._running)
        kv_tokens = self._options.kv_tokens
        return Stats(
            slots=self._options.slots,
            running=running,
            waiting=len(self._waiting),
            paused=len(self._all) - running - len(self._waiting),
            kv_tokens_used=min(kv_tokens, round(progress.kv_share * kv_tokens)) if running else 0,
            kv_tokens_total=kv_tokens,
            generated_tokens=self._generated,
            prefilled_tokens=progress.prefilled,
            reused_tokens=progress.reused,
            guessed_tokens=0,
            confirmed_tokens=0,
            preempted=self._preempted,
            steps=progress.steps,
            last_token_age_s=None if self._last_token is None else self._clock() - self._last_token,
            step_age_s=time.monotonic() - max(progress.heard, self._busy_since) if running else 0.0,
        )

    def _enqueue(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._to_admit = True

    def _vacate(self, sequence: Sequence) -> None:
        if key := self._keys.pop(sequence, None):
            del self._running[key]
            self._vllm.drop(key)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._to_admit = True

    def _end(self, sequence: Sequence, output: Output) -> None:
        self._vacate(sequence)
        del self._all[output.seq]
        self._outputs.append(output)

    def _is_overdue(self, sequence: Sequence) -> bool:
        deadline = sequence.request.deadline
        return deadline is not None and deadline <= self._clock()

    def _expire(self) -> None:
        for sequence in [s for s in self._all.values() if self._is_overdue(s)]:
            self._end(sequence, Output(sequence.request.seq, finish="expired"))

    def _admit(self) -> None:
        self._to_admit = False
        while sequence := self._policy.next(self._waiting, list(self._running.values())):
            if not self._has_room_for(sequence):
                break
            self._waiting.remove(sequence)
            self._policy.admitted(sequence, self._waiting)
            self._start(sequence)

    def _has_room_for(self, sequence: Sequence) -> bool:
        if len(self._running) < self._options.slots:
            return True
        victims = self._policy.victims(sequence, list(self._running.values()))
        if victims:
            self._preempted += 1
            self._vacate(victims[0])
            self._enqueue(victims[0])
        return bool(victims)

    def _start(self, sequence: Sequence) -> None:
        request = sequence.request
        if not sequence.entered:
            sequence.entered = True
            self.on_begin([request.seq])
        if not self._running:
            self._busy_since = time.monotonic()
        self._starts += 1
        key = f"{request.seq}.{self._starts}"
        self._running[key] = sequence
        self._keys[sequence] = key
        self._vllm.add(msgspec.structs.replace(request, output=tuple(sequence.output)), key)

    def _settle(self, sequence: Sequence, event: Event) -> None:
        seq, tokens, finish = sequence.request.seq, event.tokens, event.finish
        logprobs = event.logprobs
        if finish == "stop" and tokens and tokens[-1] in vllm_setup.stop_ids(sequence.request.sampling, self._eos_ids):
            tokens, logprobs = tokens[:-1], logprobs[:-1]  # vLLM shows the token that it stopped at
        if tokens:
            sequence.output += tokens
            self._generated += len(tokens)
            self._last_token = self._clock()
        if event.error is not None:
            self._end(sequence, checks.failed(seq, *event.error))
        elif finish in {"stop", "length"}:
            self._end(sequence, Output(seq, tokens, logprobs=logprobs, finish=finish))
        elif finish is not None:
            self._end(sequence, checks.failed(seq, "engine_failed", f"vLLM ended it with {finish!r}"))
        elif tokens:
            self._outputs.append(Output(seq, tokens, logprobs=logprobs))


def _unsupported(request: Request) -> Output | None:
    names = ", ".join(vllm_setup.unsupported(request.sampling))
    return checks.failed(request.seq, checks.UNSUPPORTED, f"vLLM does not do: {names}") if names else None


def load_engine(folder: Path, card: EngineCard, options: EngineOptions) -> VllmEngine:
    """Start vLLM on a model's folder; takes as long as its imports and the weights do.

    Raises ValueError for options it cannot have, and what vLLM raises when it does not start.
    """
    return VllmEngine(start(folder, card, options), capabilities(card, options), options, card.eos_token_ids)


def start(folder: Path, card: EngineCard, options: EngineOptions) -> VllmThread:
    own = msgspec.convert(card.options, vllm_setup.Options)
    vllm_setup.prepare_environment(options)
    longest = vllm_setup.context(card.max_context, options)
    eos_ids = frozenset(card.eos_token_ids)
    thread = VllmThread(partial(vllm_setup.sampling_params, max_context=longest, eos_ids=eos_ids))
    thread.start(vllm_setup.engine_args(folder, card.max_context, options, own))
    return thread


def capabilities(card: EngineCard, options: EngineOptions) -> Capabilities:
    return Capabilities(
        pause=False,
        keyed_sampling=False,
        max_context=vllm_setup.context(card.max_context, options),
        vocab_size=card.vocab_size,
        prefix_cache=options.prefix_tokens > 0,
        engine=card.engine,
    )
