"""What an engine is. The runner and the engine's host speak only these words.

An engine takes sequences, advances all of them by `step()`, and tells what became of each. It knows token ids;
text (detokenising, stop strings) is put around it in `text.py`; queues and Redis are unknown to it. An engine runs
in one thread of a process of its own: nothing here needs a lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

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
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    json_schema: str | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """What the model itself gave to a token, before everything that SamplingParams make of it."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the best tokens, best first; as many for each token of a sequence


class Request(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
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


class EmbedRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Inputs to make vectors of."""

    seq: str  # unique among the live ones of this engine
    inputs: tuple[Tokens, ...]  # none of them empty
    done: int = 0  # leading inputs that have their vectors already, by whomever
    dimensions: int = 0  # leading ones kept, the rest cut and the vector normalised again; 0 keeps all
    priority: int = 0  # as a Request has them
    deadline: float | None = None
    tenant: str = ""
    weight: float = 1.0


Ask = Request | EmbedRequest


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step brought to one sequence."""

    seq: str
    tokens: Tokens = ()  # new ones, in order; raw tokens from an engine, released ones (see text.py) from the host
    pieces: tuple[str, ...] = ()  # the text of each token; filled in by text.py
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, where they were asked for
    vectors: tuple[bytes, ...] = ()  # of an embedding engine: of the next inputs, in order; little-endian float32
    finish: str | None = None  # "stop" | "length" | "expired" | "cancelled" | "error"; the last Output of a sequence
    error_code: str | None = None  # with finish "error": "bad_token" | "context_exceeded" | "engine_failed" | ...
    error: str | None = None  # one sentence; never the prompt


class Capabilities(msgspec.Struct, frozen=True):
    """What this engine can do; a request that needs more is refused clearly."""

    pause: bool  # it holds a sequence back in place; without, pause() takes it out and resume() computes it anew
    keyed_sampling: bool  # draws depend on (seed, position, choice) alone
    max_context: int  # prompt + output, in tokens
    vocab_size: int
    exact: bool = False  # a text does not depend on who shared its batch, nor on where it was interrupted
    prefix_cache: bool = False  # what begins like an earlier sequence is not computed again
    json_schema: bool = False  # a text can be held to a JSON schema
    engine: str = ""  # its name, as in a model's card

    @property
    def lacks(self) -> tuple[str, ...]:
        """The names of what it cannot do."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) is False)


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
    guessed_tokens: int  # since start, see speculation.py
    confirmed_tokens: int  # since start: guessed ones that were right, so that they cost no step of their own
    steps: int  # since start
    last_token_age_s: float | None  # None before the first
    step_age_s: float = 0.0  # how long the step in hand takes, where step() is not what makes it


AskT_contra = TypeVar("AskT_contra", contravariant=True)


class Serving(Protocol[AskT_contra]):
    """One model on one device."""

    on_begin: Callable[[list[str]], None]
    """Called within step() with the sequences it is about to work on for the first time: should the process die of one
    of them, its owner knows whom to suspect."""

    ready_fd: int | None
    """Readable when step() has something to bring, of an engine that works by itself between two calls."""

    @property
    def capabilities(self) -> Capabilities: ...

    def submit(self, request: AskT_contra) -> None:
        """Take a sequence. A bad one ends by itself: its next Output has finish="error"; nothing raises."""

    def abort(self, seq: str) -> None:
        """End a sequence at once; its slot is free before the next step. Unknown ids are ignored.
        Its last Output has finish="cancelled"."""

    def pause(self, seq: str) -> None:
        """Give the sequence's slot to others; it keeps its tokens."""

    def resume(self, seq: str) -> None:
        """Let a paused sequence go on where it was."""

    def step(self) -> list[Output]:
        """Admit what fits, advance every running sequence (by a token or more, or by one chunk of its prompt).
        Empty when there is nothing to do; never blocks."""

    @property
    def idle(self) -> bool:
        """True when step() would do nothing."""

    def stats(self) -> Stats: ...


class Engine(Serving[Request], Protocol):
    """Of a model that writes text."""


class Embedder(Serving[EmbedRequest], Protocol):
    """Of a model that makes vectors."""
