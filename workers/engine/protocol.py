"""What an engine is. The runner and the engine's host speak only these words.

An engine takes sequences, advances all of them by `step()`, and tells what became of each. It knows token ids;
text (detokenising, stop strings) is put around it in `text.py`; queues and Redis are unknown to it. An engine runs
in one thread of a process of its own: nothing here needs a lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

Tokens = tuple[int, ...]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn; the meaning and the bounds are those of brokers.job.Sampling."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to generate."""

    seq: str  # unique among the live sequences of this engine
    prompt: Tokens  # never empty
    output: Tokens = ()  # generated earlier, by whomever: continue after them (counted in max_tokens)
    sampling: SamplingParams = SamplingParams()
    choice: int = 0  # with seed and position it keys the random draw
    priority: int = 0  # rank of its lane: lower is served first, see policy.py
    deadline: float | None = None  # unix seconds; a sequence past it ends with reason "expired"
    tenant: str = ""  # whose it is: nothing is shared between two of them
    weight: float = 1.0  # of the tenant's share of slots


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step brought to one sequence."""

    seq: str
    tokens: Tokens = ()  # new ones, in order; raw tokens from an engine, released ones (see text.py) from the host
    pieces: tuple[str, ...] = ()  # the text of each token; filled in by text.py
    finish: str | None = None  # "stop" | "length" | "expired" | "cancelled" | "error"; the last Output of a sequence
    error_code: str | None = None  # with finish "error": "bad_token" | "context_exceeded" | "engine_failed" | ...
    error: str | None = None  # one sentence; never the prompt


class Capabilities(msgspec.Struct, frozen=True):
    """What this engine can do; a request that needs more is refused clearly."""

    pause: bool
    keyed_sampling: bool  # draws depend on (seed, position, choice) alone
    max_context: int  # prompt + output, in tokens
    vocab_size: int
    exact: bool = False  # a text does not depend on who shared its batch, nor on where it was interrupted


class Stats(msgspec.Struct, frozen=True):
    slots: int
    running: int  # in the batch
    waiting: int  # admitted, not in the batch
    paused: int
    kv_tokens_used: int
    kv_tokens_total: int
    generated_tokens: int  # since start
    prefilled_tokens: int  # since start
    preempted: int  # since start: sequences that went back to the queue for one of a higher lane
    reused_tokens: int  # since start: those that need not be prefilled, since another sequence began with them
    steps: int  # since start
    last_token_age_s: float | None  # None before the first


class Engine(Protocol):
    """One model on one device."""

    on_begin: Callable[[list[str]], None]
    """Called within step() with the sequences it is about to work on for the first time: should the process die of one
    of them, its owner knows whom to suspect."""

    @property
    def capabilities(self) -> Capabilities: ...

    def submit(self, request: Request) -> None:
        """Take a sequence. A bad one ends by itself: its next Output has finish="error"; nothing raises."""

    def abort(self, seq: str) -> None:
        """End a sequence at once; its slot is free before the next step. Unknown ids are ignored.
        Its last Output has finish="cancelled"."""

    def pause(self, seq: str) -> None:
        """Give the sequence's slot to others; it keeps its tokens."""

    def resume(self, seq: str) -> None:
        """Let a paused sequence go on where it was."""

    def step(self) -> list[Output]:
        """Admit what fits, advance every running sequence (by one token, or by one chunk of its prompt).
        Empty when there is nothing to do; never blocks."""

    @property
    def idle(self) -> bool:
        """True when step() would do nothing."""

    def stats(self) -> Stats: ...
