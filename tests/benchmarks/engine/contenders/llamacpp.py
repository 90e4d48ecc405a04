"""llama.cpp's own server, within the process, without HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import xllamacpp

from tests.benchmarks.engine.contender import Contender, Setup
from tests.benchmarks.engine.workload import Arrival, Trace


def load(setup: Setup) -> LlamaCpp:
    params = xllamacpp.CommonParams()
    params.model.path = setup.gguf
    params.n_ctx = setup.kv_tokens  # of all sequences together
    params.n_parallel = setup.slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup.threads
    params.cache_prompt = setup.prefix_tokens > 0
    params.verbosity = -1
    return LlamaCpp(xllamacpp.Server(params), reuse=setup.prefix_tokens > 0)


class LlamaCpp(Contender):
    def __init__(self, server: Any, *, reuse: bool) -> None:
        self._server = server
        self._reuse = reuse

    def serve(self, arrivals: Sequence[Arrival]) -> list[Trace]:
        """One thread for each sequence, as its HTTP server has."""
        start = time.perf_counter()
        seen: list[list[float]] = [[] for _ in arrivals]
        threads = [
            threading.Thread(target=self._one, args=(arrival, start, times))
            for arrival, times in zip(arrivals, seen, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not all(seen):
            raise RuntimeError("a sequence has no tokens")
        return [Trace(arrival.after_s, times, arrival.tokens) for arrival, times in zip(arrivals, seen, strict=True)]

    def close(self) -> None:
        del self._server

    def _one(self, arrival: Arrival, start: float, times: list[float]) -> None:
        time.sleep(max(0.0, start + arrival.after_s - time.perf_counter()))

        def heard(piece: dict[str, Any]) -> bool:
            if piece["choices"][0]["finish_reason"] is None:  # the last one only says so
                times.append(time.perf_counter() - start)
            return False  # go on

        asked = {"prompt": list(arrival.prompt), "n_predict": arrival.tokens, "temperature": 0, "ignore_eos": True}
        self._server.handle_completions({**asked, "stream": True, "cache_prompt": self._reuse}, heard)
