"""What the model's own code can do at best: all sequences known beforehand, in one padded batch, nothing around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from tests.benchmarks.engine.contender import Contender, Setup
from tests.benchmarks.engine.contenders.generating import load_model, padded
from tests.benchmarks.engine.workload import Arrival, Trace


def load(setup: Setup) -> Bare:
    return Bare(load_model(setup))


class Bare(Contender):
    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def serve(self, arrivals: Sequence[Arrival]) -> list[Trace]:
        start = time.perf_counter()
        ids, mask = padded(arrivals)
        cache: Any = DynamicCache()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        seen, columns = list[float](), list[torch.Tensor]()
        for _ in range(max(arrival.tokens for arrival in arrivals)):
            ids = self._forward(ids, mask, positions, cache)
            columns.append(ids)
            seen.append(time.perf_counter() - start)
            mask = torch.cat([mask, mask.new_ones((len(mask), 1))], dim=1)
            positions = mask.sum(-1, keepdim=True) - 1
        rows = torch.cat(columns, dim=1).tolist()
        return [Trace(0.0, seen, len(row), row) for row in rows]

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """The next token of each row [rows, 1]."""
        logits: torch.Tensor = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1].argmax(-1, keepdim=True)
