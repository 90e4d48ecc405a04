"""The engine's child with a clock in it: python -m tests.benchmarks.engine.timed_child TIMES FOLDER OPTIONS FD PARENT

Writes every step's times to the file TIMES when it is told to stop.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from workers.engine import child
from workers.engine.loop import BatchEngine
from workers.engine.protocol import Output
from workers.engine.scheduler import Plan


class Step(msgspec.Struct):
    """One step, in seconds: of the model within the engine within the whole."""

    decoding: int = 0
    prefilling: int = 0
    model_s: float = 0.0
    engine_s: float = 0.0
    whole_s: float = 0.0  # from the end of the step before: commands, text and the channel too


steps: list[Step] = []


class TimedChild(child.Child):
    """A Child that notes what each turn of its loop takes."""

    def __init__(self, engine: Any, *rest: Any) -> None:
        assert isinstance(engine, BatchEngine)
        super().__init__(engine, *rest)
        self._now = Step()
        self._began = time.perf_counter()
        self._run_model, self._run_engine = engine._model.run, engine.step
        engine._model.run = self._timed_model  # type: ignore[method-assign]
        engine.step = self._timed_engine  # type: ignore[method-assign]

    def _timed_model(self, plan: Plan) -> Any:
        began = time.perf_counter()
        try:
            return self._run_model(plan)
        finally:
            self._now.model_s = time.perf_counter() - began
            self._now.decoding, self._now.prefilling = len(plan.decode), len(plan.prefill)

    def _timed_engine(self) -> list[Output]:
        began = time.perf_counter()
        try:
            return self._run_engine()
        finally:
            self._now.engine_s = time.perf_counter() - began

    def _report_stats(self) -> None:
        super()._report_stats()
        now = time.perf_counter()
        self._now.whole_s = now - self._began
        steps.append(self._now)
        self._now, self._began = Step(), now


def main(times: str, *rest: str) -> None:
    child.Child = TimedChild  # type: ignore[misc, assignment]
    child.main(*rest)
    Path(times).write_bytes(msgspec.json.encode(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
