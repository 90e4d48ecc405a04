"""Contenders that take turns on the same cores, in one run, so that a machine that drifts favours nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import psutil

from tests.benchmarks.engine.contender import CONTENDERS, Setup
from tests.benchmarks.engine.models import Q4, Models
from tests.benchmarks.engine.process import Bounds, ContenderError, Running
from tests.benchmarks.engine.workload import Arrival, Texts, Trace, staggered

Turns = dict[str, list[list[Trace]]]
"""By contender, the traces of each of its runs."""


@dataclass
class Bench:
    """What all parts share."""

    texts: Texts
    models: Models
    bounds: Bounds
    quick: bool
    spent_s: float = 0.0  # processor time of contenders that have ended
    left_out: list[str] = field(default_factory=list)

    def setup(self, name: str, dtype: str, slots: int, kv_tokens: int, prefix_tokens: int = 0) -> Setup:
        """Raises ContenderError where the model is not at hand in the form that it wants."""
        folder = self.models.generic if CONTENDERS[name].generic else self.models.folder
        gguf = ""
        if CONTENDERS[name].module == "llamacpp":
            path = self.models.gguf(Q4 if name.endswith("q4") else dtype)
            if path is None:
                raise ContenderError("left out: llama.cpp's model is not here (`make bench-engine` fetches it)")
            gguf = str(path)
        return Setup(name, str(folder), gguf, dtype, len(self.bounds.cores), slots, kv_tokens, prefix_tokens)

    @contextmanager
    def running(self, setup: Setup, bounds: Bounds | None = None) -> Iterator[Running]:
        """A contender that has served once already."""
        with Running(setup, bounds or self.bounds) as running:
            try:
                running.serve(staggered(self.texts, min(4, setup.slots), 8, every_s=0.0, seed=-1))
                yield running
            finally:
                self.spent_s += running.cpu_s()


class Lineup:
    """Those of the named that can be had. Ends with the block; who fails is noted, and the others go on."""

    def __init__(
        self, bench: Bench, names: Sequence[str], dtype: str, slots: int, kv_tokens: int, prefix_tokens: int = 0
    ) -> None:
        self.running: dict[str, Running] = {}
        self._bench = bench
        self._names = [name for name in names if dtype in CONTENDERS[name].dtypes]
        self._how = (dtype, slots, kv_tokens, prefix_tokens)
        self._stack = ExitStack()

    def __enter__(self) -> Lineup:
        for name in self._names:
            with self._noted():
                running = self._stack.enter_context(self._bench.running(self._bench.setup(name, *self._how)))
                with running.turn():
                    self.running[name] = running
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def turns(self, arrivals: Sequence[Arrival], rounds: int, among: Sequence[str] | None = None) -> Turns:
        """Each of them (or of `among`) serves the same in turn, so many times."""
        seen: Turns = {}
        for _ in range(rounds):
            for name in [name for name in self.running if among is None or name in among]:
                with self._noted(name):
                    seen.setdefault(name, []).append(self.one(name, arrivals))
        return {name: runs for name, runs in seen.items() if name in self.running}

    def one(self, name: str, arrivals: Sequence[Arrival]) -> list[Trace]:
        with self.running[name].turn():
            return self.running[name].serve(arrivals)

    @contextmanager
    def _noted(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except ContenderError as error:
            self.running.pop(name, None)
            if str(error) not in self._bench.left_out:
                self._bench.left_out.append(str(error))


class Others:
    """How much of the processor others use meanwhile."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._began = self._now()

    def cores(self) -> float:
        """On average since the start; contenders must have ended."""
        (at, busy, ours), (at0, busy0, ours0) = self._now(), self._began
        return max(0.0, (busy - busy0) - (ours - ours0)) / max(at - at0, 1e-3)

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
        return time.monotonic(), busy, self._bench.spent_s + sum(psutil.Process().cpu_times()[:2])
