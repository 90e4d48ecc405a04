"""Our engine in its own process, through the host that a worker has."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from tests.benchmarks.engine.contender import CONTENDERS, Contender, Setup
from tests.benchmarks.engine.workload import Arrival, Trace
from workers.engine.host import EngineHost, EngineOptions
from workers.engine.protocol import Output, Request, SamplingParams

_PAUSE_S = 0.2


class _Heard(NamedTuple):
    """What the host's thread has been told."""

    at: float  # time.perf_counter()
    outputs: Sequence[Output] = ()
    begun: Sequence[str] = ()
    gone: str = ""  # why the engine has ended


def load(setup: Setup) -> Ours:
    return Ours(setup)


def options(setup: Setup) -> EngineOptions:
    return EngineOptions(
        slots=setup.slots,
        kv_tokens=setup.kv_tokens,
        threads=setup.threads,
        device="cpu",
        dtype=setup.dtype,
        prefix_tokens=setup.prefix_tokens,
        speculation=CONTENDERS[setup.name].guessing,
        exact=CONTENDERS[setup.name].exact,
    )


class Ours(Contender):
    def __init__(self, setup: Setup) -> None:
        self._inbox: SimpleQueue[_Heard] = SimpleQueue()
        self._host = EngineHost(
            Path(setup.folder),
            options(setup),
            on_outputs=lambda outputs: self._hear(outputs=outputs),
            on_exit=lambda why: self._hear(gone=why),
            on_begin=lambda names: self._hear(begun=names),
        )
        found = self._host.start()
        if CONTENDERS[setup.name].exact and not found.exact:
            raise RuntimeError("the kernels of this machine are not exact")
        self._runs = 0

    def serve(self, arrivals: Sequence[Arrival]) -> list[Trace]:
        self._runs += 1
        return _Run(self._host, self._inbox, arrivals, self._runs).traces()

    def close(self) -> None:
        self._host.stop()

    def _hear(self, outputs: Sequence[Output] = (), begun: Sequence[str] = (), gone: str = "") -> None:
        self._inbox.put(_Heard(time.perf_counter(), outputs, begun, gone))


class _Live:
    """A sequence on its way; its name changes when it is handed over."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.begun = 0
        self.paused = self.handed_over = False

    @property
    def trace(self) -> Trace:
        return Trace(self.arrival.after_s, self.times, len(self.tokens), self.tokens, self.begun)


class _Run:
    """What is due, by time, and what comes back."""

    def __init__(self, host: EngineHost, inbox: SimpleQueue[_Heard], arrivals: Sequence[Arrival], number: int) -> None:
        self._host = host
        self._inbox = inbox
        self._names = (f"{number}-{index}" for index in count())
        self._all = [_Live(arrival) for arrival in arrivals]
        self._live: dict[str, _Live] = {}
        self._start = time.perf_counter()
        self._ties = count()
        self._due: list[tuple[float, int, _Live | str]] = []  # a sequence to submit, or the name of one to resume
        for live in self._all:
            self._plan(live.arrival.after_s, live)

    def traces(self) -> list[Trace]:
        left = len(self._all)
        while left:
            self._act()
            heard = self._next()
            if heard.gone:
                raise RuntimeError(heard.gone)
            for name in heard.begun:
                self._live[name].begun += 1
            left -= sum(self._take(output, heard.at - self._start) for output in heard.outputs)
        return [live.trace for live in self._all]

    def _plan(self, at_s: float, what: _Live | str) -> None:
        heapq.heappush(self._due, (at_s, next(self._ties), what))

    def _act(self) -> None:
        while self._due and self._due[0][0] <= time.perf_counter() - self._start:
            what = heapq.heappop(self._due)[2]
            if isinstance(what, str):
                self._host.resume(what)
            else:
                self._submit(what)

    def _submit(self, live: _Live) -> None:
        name, arrival = next(self._names), live.arrival
        self._live[name] = live
        sampling = SamplingParams(max_tokens=arrival.tokens, temperature=arrival.temperature, ignore_eos=True)
        output = tuple(live.tokens)
        self._host.submit(Request(name, arrival.prompt, output, sampling=sampling, priority=arrival.priority))

    def _next(self) -> _Heard:
        wait = self._start + self._due[0][0] - time.perf_counter() if self._due else None
        try:
            return self._inbox.get(timeout=None if wait is None else max(0.0, wait))
        except Empty:
            return _Heard(0.0)

    def _take(self, output: Output, at_s: float) -> bool:
        """Whether the sequence has come to its end."""
        live = self._live.get(output.seq)
        if live is None:
            return False
        live.times += [at_s] * len(output.tokens)
        live.tokens += output.tokens
        if output.finish == "error":
            raise RuntimeError(f"a sequence failed: {output.error}")
        if output.finish == "cancelled":
            self._submit(live)
        elif output.finish is None:
            self._interrupt(output.seq, live)
        return output.finish in {"stop", "length"}

    def _interrupt(self, name: str, live: _Live) -> None:
        arrival, done = live.arrival, len(live.tokens)
        if arrival.pause_at and done >= arrival.pause_at and not live.paused:
            live.paused = True
            self._host.pause(name)
            self._plan(time.perf_counter() - self._start + _PAUSE_S, name)
        if arrival.hand_over_at and done >= arrival.hand_over_at and not live.handed_over:
            live.handed_over = True
            self._host.abort(name)
