"""Batching by length against one input a forward and against padded batches in the order of arrival.

    python -m tests.benchmarks.embeddings

One model, one thread, the same inputs, in turns; lengths are log-normal, as texts' are: many short ones, a few long.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModel

from tests.benchmarks.report import Row, table
from workers.engine.build import build_embedder
from workers.engine.protocol import EmbedRequest, Tokens
from workers.engine.wire import EngineOptions

MODEL = "all-minilm-l6-v2"
_INPUTS = 256
_BATCH = 32
_ROUNDS = 3
_CLS, _SEP = 101, 102
_OPTIONS = EngineOptions(slots=16, kv_tokens=256, threads=1, device="cpu", dtype="float32")


def run(models: Path) -> list[Row]:
    inputs = sample(_INPUTS)
    ways = Ways(models / MODEL)
    seconds = _in_turns(
        {
            "ours": lambda: ways.ours(inputs),
            "one": lambda: ways.padded(inputs, 1),
            "padded": lambda: ways.padded(inputs, _BATCH),
        }
    )
    tokens = sum(map(len, inputs))
    what = f"embeddings, {_INPUTS} inputs of {tokens // _INPUTS} tokens on average, tokens/s"
    return [
        _row(what, tokens, seconds, "one", "the plain model, one input a forward"),
        _row(what, tokens, seconds, "padded", f"the plain model, padded batches of {_BATCH} as they come"),
    ]


def sample(count: int) -> list[Tokens]:
    chance = random.Random(1)
    lengths = [min(254, int(chance.lognormvariate(3.3, 0.9)) + 1) for _ in range(count)]
    return [(_CLS, *(chance.randrange(1000, 30_000) for _ in range(length)), _SEP) for length in lengths]


class Ways:
    """The engine and the plain model on the same weights."""

    def __init__(self, folder: Path) -> None:
        self._engine = build_embedder(folder, _OPTIONS)
        self._plain = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    def ours(self, inputs: list[Tokens]) -> None:
        self._engine.submit(EmbedRequest("bench", tuple(inputs)))
        while not self._engine.idle:
            self._engine.step()

    @torch.inference_mode()
    def padded(self, inputs: list[Tokens], size: int) -> None:
        for start in range(0, len(inputs), size):
            batch = inputs[start : start + size]
            ids = torch.zeros((len(batch), max(map(len, batch))), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, tokens in enumerate(batch):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                mask[row, : len(tokens)] = 1
            hidden = self._plain(input_ids=ids, attention_mask=mask).last_hidden_state
            _ = (hidden * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)


def _in_turns(ways: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The median of each way's rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in seconds.items()}


def _row(what: str, tokens: int, seconds: dict[str, float], other: str, against: str) -> Row:
    ratio = seconds[other] / seconds["ours"]
    return Row(what, f"{tokens / seconds['ours']:,.0f}", f"{tokens / seconds[other]:,.0f}", f"{ratio:.1f}", against)


if __name__ == "__main__":
    print(table(run(Path(".lingbot/models"))))
