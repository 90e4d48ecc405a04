"""vLLM behind our protocol.

vLLM steps by itself, in processes of its own (vllm_thread.py); step() here takes what it has brought and gives it what
it has room for. It is given `slots` sequences and no more: who waits for a place waits here, in our order, and so the
sequences it has begun are known, should it die of one.

It cannot hold one sequence of its batch back: pause() ends it there, and resume() begins it again from its tokens.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from workers.engine import checks, vllm_setup
from workers.engine.protocol import Capabilities, Output, Request, Stats
from workers.engine.vllm_thread import Event, VllmThread
from workers.engine.wire import EngineOptions


class VllmGoneError(RuntimeError):
    """vLLM has ended; what it had is to be resubmitted to another."""


@dataclass(slots=True, eq=False)
class _Sequence:
    request: Request
    arrival: int
    output: list[int] = field(default_factory=list)  # all of it, what earlier owners generated included
    starts: int = 0  # in vLLM, since it was submitted
    id: str = ""  # there, of the last start
    paused: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return self.request.priority, self.arrival


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
        self._all: dict[str, _Sequence] = {}
        self._waiting: list[_Sequence] = []
        self._running: dict[str, _Sequence] = {}  # by their ids in vLLM
        self._outputs: list[Output] = []
        self._arrivals = self._generated = 0
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
        sequence = _Sequence(request, self._arrivals, list(request.output))
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
            if sequence := self._running.get(event.id):  # else it was dropped meanwhile
                self._settle(sequence, event)
        self._admit()
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def idle(self) -> bool:
        room = self._waiting and len(self._running) < self._options.slots
        return not (self._outputs or self._vllm.has_events or room or any(map(self._is_overdue, self._all.values())))

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
            steps=progress.steps,
            last_token_age_s=None if self._last_token is None else self._clock() - self._last_token,
            step_age_s=time.monotonic() - max(progress.heard, self._busy_since) if running else 0.0,
        )

    def _enqueue(self, sequence: _Sequence) -> None:
        insort(self._waiting, sequence, key=lambda waiting: waiting.order)

    def _vacate(self, sequence: _Sequence) -> None:
        if self._running.pop(sequence.id, None):
            self._vllm.drop(sequence.id)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def _end(self, sequence: _Sequence, output: Output) -> None:
        self._vacate(sequence)
        del self._all[output.seq]
        self._outputs.append(output)

    def _is_overdue(self, sequence: _Sequence) -> bool:
        deadline = sequence.request.deadline
        return deadline is not None and deadline <= self._clock()

    def _expire(self) -> None:
        for sequence in [s for s in self._all.values() if self._is_overdue(s)]:
            self._end(sequence, Output(sequence.request.seq, finish="expired"))

    def _admit(self) -> None:
        room = self._options.slots - len(self._running)
        admitted, self._waiting = self._waiting[:room], self._waiting[room:]
        if begun := [sequence.request.seq for sequence in admitted if not sequence.starts]:
            self.on_begin(begun)
        if admitted and not self._running:
            self._busy_since = time.monotonic()
        for sequence in admitted:
            sequence.starts += 1
            sequence.id = f"{sequence.request.seq}.{sequence.arrival}.{sequence.starts}"
            self._running[sequence.id] = sequence
            request = msgspec.structs.replace(sequence.request, output=tuple(sequence.output))
            self._vllm.add(request, sequence.id)

    def _settle(self, sequence: _Sequence, event: Event) -> None:
        seq, tokens, finish = sequence.request.seq, event.tokens, event.finish
        if finish == "stop" and tokens and tokens[-1] in self._eos_ids:
            tokens = tokens[:-1]  # vLLM shows the token that it stopped at
        if tokens:
            sequence.output += tokens
            self._generated += len(tokens)
            self._last_token = self._clock()
        if event.error is not None:
            self._end(sequence, checks.failed(seq, *event.error))
        elif finish in {"stop", "length"}:
            self._end(sequence, Output(seq, tokens, finish=finish))
        elif finish is not None:
            self._end(sequence, checks.failed(seq, "engine_failed", f"vLLM ended it with {finish!r}"))
        elif tokens:
            self._outputs.append(Output(seq, tokens))


def _unsupported(request: Request) -> Output | None:
    names = ", ".join(vllm_setup.unsupported(request.sampling))
    return checks.failed(request.seq, checks.UNSUPPORTED, f"vLLM does not do: {names}") if names else None


def load_engine(
    folder: Path, max_context: int, vocab_size: int, eos_ids: Collection[int], options: EngineOptions, own: object
) -> VllmEngine:
    """Start vLLM on a model's folder; takes as long as its imports and the weights do. `own`: the card's options.

    Raises ValueError for options it cannot have, and what vLLM raises when it does not start.
    """
    vllm_options = msgspec.convert(own, vllm_setup.Options)
    thread = start(folder, max_context, eos_ids, options, vllm_options)
    return VllmEngine(thread, capabilities(max_context, vocab_size, options), options, eos_ids)


def start(
    folder: Path, max_context: int, eos_ids: Collection[int], options: EngineOptions, own: vllm_setup.Options
) -> VllmThread:
    vllm_setup.prepare_environment(options)
    longest = vllm_setup.context(max_context, options)
    thread = VllmThread(partial(vllm_setup.sampling_params, max_context=longest, eos_ids=frozenset(eos_ids)))
    thread.start(vllm_setup.engine_args(folder, max_context, options, own))
    return thread


def capabilities(max_context: int, vocab_size: int, options: EngineOptions) -> Capabilities:
    return Capabilities(
        pause=False,
        keyed_sampling=False,
        max_context=vllm_setup.context(max_context, options),
        vocab_size=vocab_size,
        prefix_cache=options.prefix_tokens > 0,
    )
