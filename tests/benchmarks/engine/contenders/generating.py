"""The usual Celery worker: transformers' `generate`, for one sequence at a time or for those that wait, padded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from tests.benchmarks.engine.contender import Contender, Setup
from tests.benchmarks.engine.workload import Arrival, Trace


def load_model(setup: Setup) -> Any:
    torch.set_num_threads(setup.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(
        setup.folder, dtype=getattr(torch, setup.dtype), local_files_only=True
    )
    model.generation_config.eos_token_id = None  # whatever it writes, it goes on
    return model.eval()


def load(setup: Setup) -> Generating:
    return Generating(load_model(setup), 1 if setup.name == "generate" else setup.slots)


class Generating(Contender):
    """A loop over a queue."""

    def __init__(self, model: Any, batch: int) -> None:
        self._model = model
        self._batch = batch

    def serve(self, arrivals: Sequence[Arrival]) -> list[Trace]:
        start, traces = time.perf_counter(), list[Trace]()
        while left := arrivals[len(traces) :]:
            time.sleep(max(0.0, start + left[0].after_s - time.perf_counter()))
            now = time.perf_counter() - start
            traces += self._generate([arrival for arrival in left if arrival.after_s <= now][: self._batch], start)
        return traces

    @torch.inference_mode()
    def _generate(self, batch: Sequence[Arrival], start: float) -> list[Trace]:
        ids, mask = padded(batch)
        times = _Times()
        tokens = max(arrival.tokens for arrival in batch)
        rows = self._model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=0, streamer=times
        )
        written = rows[:, ids.shape[1] :].tolist()
        seen = [moment - start for moment in times.seen]
        return [_trace(arrival, seen, row) for arrival, row in zip(batch, written, strict=True)]


def padded(batch: Sequence[Arrival]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [rows, longest], padded on the left."""
    width = max(len(arrival.prompt) for arrival in batch)
    ids = torch.zeros((len(batch), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, arrival in enumerate(batch):
        ids[row, width - len(arrival.prompt) :] = torch.tensor(arrival.prompt)
        mask[row, width - len(arrival.prompt) :] = 1
    return ids, mask


def _trace(arrival: Arrival, seen: list[float], row: list[int]) -> Trace:
    return Trace(arrival.after_s, seen[: arrival.tokens], arrival.tokens, row[: arrival.tokens])


class _Times(BaseStreamer):
    """When each step's tokens came."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self.seen.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        pass
