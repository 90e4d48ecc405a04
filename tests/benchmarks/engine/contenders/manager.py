"""transformers' own continuous batching. Its sizes are given: by itself it takes most of the memory there is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.benchmarks.engine.contender import Contender, Setup
from tests.benchmarks.engine.contenders.generating import load_model
from tests.benchmarks.engine.workload import Arrival, Trace

_PAGE = 32  # tokens
_STEP_TOKENS = 512  # of prompts and outputs in one step
_NONE = -1  # no token ends a sequence
_WAIT_S = 0.05


def load(setup: Setup) -> Managed:
    sizes = ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=-(-setup.kv_tokens // _PAGE) + setup.slots,  # a sequence's last page is half empty
        max_batch_tokens=_STEP_TOKENS,
        max_requests_per_batch=setup.slots,
        allow_block_sharing=setup.prefix_tokens > 0,
    )
    how: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=_NONE, pad_token_id=0, max_new_tokens=1
    )
    with torch.inference_mode():  # its thread takes this over
        manager = load_model(setup).init_continuous_batching(how, sizes)
        manager.start()
    return Managed(manager)


class Managed(Contender):
    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._runs = 0

    def serve(self, arrivals: Sequence[Arrival]) -> list[Trace]:
        self._runs += 1
        names = {f"{self._runs}-{number}": number for number in range(len(arrivals))}
        seen: list[list[float]] = [[] for _ in arrivals]
        tokens: list[list[int]] = [[] for _ in arrivals]
        waiting, left, start = list(names), len(arrivals), time.perf_counter()
        while left:
            while waiting and arrivals[names[waiting[0]]].after_s <= time.perf_counter() - start:
                self._add(waiting[0], arrivals[names[waiting.pop(0)]])
            result = self._manager.get_result(timeout=_until(arrivals, names, waiting, start))
            if result is None:
                self._check()
                continue
            number = names[result.request_id]
            seen[number].append(time.perf_counter() - start)
            tokens[number] = list(result.generated_tokens)
            left -= result.is_finished()
        return [
            Trace(arrival.after_s, times, len(row), row)
            for arrival, times, row in zip(arrivals, seen, tokens, strict=True)
        ]

    def close(self) -> None:
        self._manager.stop(block=True, timeout=5, hard_stop=True)

    def _add(self, name: str, arrival: Arrival) -> None:
        self._manager.add_request(
            list(arrival.prompt), request_id=name, max_new_tokens=arrival.tokens, streaming=True, eos_token_id=_NONE
        )

    def _check(self) -> None:
        if not self._manager.is_running():
            raise RuntimeError("its loop has ended")


def _until(arrivals: Sequence[Arrival], names: dict[str, int], waiting: list[str], start: float) -> float:
    """How long to wait for a result: no longer than to the next arrival."""
    if not waiting:
        return _WAIT_S
    return min(_WAIT_S, max(0.0, start + arrivals[names[waiting[0]]].after_s - time.perf_counter()))
