"""What a contender is, and who they are. Each runs in a process of its own, some in an environment of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.benchmarks.engine.workload import Arrival, Trace


class Setup(msgspec.Struct, frozen=True):
    """How one is run."""

    name: str  # a key of CONTENDERS
    folder: str  # the model's
    gguf: str  # the same model for llama.cpp; empty where there is none
    dtype: str
    threads: int
    slots: int  # sequences at once
    kv_tokens: int
    prefix_tokens: int = 0  # beginnings of sequences kept for reuse; 0 keeps none


class Contender(ABC):
    """Loaded, and warm after a first run."""

    @abstractmethod
    def serve(self, arrivals: Sequence[Arrival]) -> list[Trace]:
        """Take each sequence when it is due, generate all; traces in the order of `arrivals`."""

    def close(self) -> None:
        """End what it has started."""
        return


class Entry(NamedTuple):
    """Where a contender is found: `load(setup)` in a module under contenders/."""

    title: str
    module: str
    environment: str = ".venv"
    exact: bool = False  # only for our own engine
    generic: bool = False  # likewise
    guessing: bool = False  # likewise
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


CONTENDERS = {
    "generate": Entry("`generate`, one by one", "generating"),
    "padded": Entry("`generate`, padded batches", "generating"),
    "bare": Entry("the bare model, one padded batch", "bare"),
    "manager": Entry("transformers' continuous batching", "manager"),
    "vllm": Entry("vLLM", "vllm", environment=".venv-vllm"),
    "llamacpp": Entry("llama.cpp", "llamacpp"),
    "llamacpp-q4": Entry("llama.cpp, Q4_1 weights", "llamacpp"),
    "generic": Entry("Lingbot, generic forward", "ours", generic=True),
    "lean": Entry("Lingbot, lean forward", "ours"),
    "guessing": Entry("Lingbot, lean forward, guessing ahead", "ours", guessing=True),
    "exact": Entry("Lingbot, lean and exact", "ours", exact=True, dtypes=("float32",)),
}


def title(name: str) -> str:
    return CONTENDERS[name].title


def interpreter(root: Path, name: str) -> Path | None:
    """The Python of its environment; None when that is not installed."""
    python = root / CONTENDERS[name].environment / "bin" / "python"
    return python if python.exists() else None
