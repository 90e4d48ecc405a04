"""The vocabulary of a job. Everything else speaks in these words; this file imports nothing of ours.

A job is frozen and changes by copy. Its life, drawn in ARCHITECTURE.md:

    accepted -> queued -> running -> succeeded | failed | cancelled | expired
                  ^---------|                          accepted -> withdrawn
"""

from __future__ import annotations

import re
import time
from enum import StrEnum
from typing import Any

import msgspec
from ulid import ULID

WORD = re.compile(r"[a-z0-9]{1,32}\Z")
"""Region codes and tenant ids: one plain word, so that nothing in them can look like a key or a pattern."""

_ULID_LENGTH = 26


class Kind(StrEnum):
    """What a job generates."""

    TEXT = "text"
    EMBEDDING = "embedding"
    IMAGE = "image"


class Lane(StrEnum):
    """A queue of its own with a prefetch of its own, highest first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class State(StrEnum):
    """Where a job stands; the terminal ones never change again."""

    ACCEPTED = "accepted"  # the record exists; the broker has not confirmed yet
    QUEUED = "queued"  # the broker holds a message for it
    RUNNING = "running"  # a worker owns it
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed before it ended
    WITHDRAWN = "withdrawn"  # the client was told 503; it will never run
    ERASED = "erased"  # its owner had it deleted; a tombstone, so that a late message finds it so


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED, State.WITHDRAWN, State.ERASED})


class FinishReason(StrEnum):
    """Why the text of a job ended; OpenAI's words where it has one."""

    STOP = "stop"  # end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How tokens are drawn. Limits are checked at the door, in producers.schemas.

    What is at its default is not sent, and a field that a reader does not know is an error: so a worker of the version
    before takes every job that it can run as it was asked, and ignores nothing.
    """

    max_tokens: int = 256  # generated tokens at most, >= 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # share of the best token's probability, [0, 1)
    seed: int = 0  # with position and choice it keys the generator; the door draws one if none was given
    repetition_penalty: float = 1.0  # > 0, over prompt and output, as in CTRL and transformers
    presence_penalty: float = 0.0  # [-2, 2], over the output, as OpenAI defines it
    frequency_penalty: float = 0.0  # [-2, 2], over the output, as OpenAI defines it
    stop: tuple[str, ...] = ()  # never shown, not even half
    ignore_eos: bool = False  # go on past end-of-sequence, for benchmarks
    logit_bias: dict[int, float] = {}  # added to the logits of these tokens, [-100, 100]
    stop_token_ids: tuple[int, ...] = ()  # they end the text and are not part of it
    logprobs: int | None = None  # with each token the log probabilities of it and of so many best ones; None is off
    json_schema: str | None = None  # the text is JSON that meets it


class TextSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag="text"):
    """What a text job asks for. The prompt travels as token ids, sealed."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling = Sampling()
    choice: int = 0  # index among the choices of one request; part of the sampling key

    @property
    def kind(self) -> Kind:
        return Kind.TEXT

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)


class EmbeddingSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag="embedding"):
    """What an embedding job asks for: a vector for each input, in order."""

    inputs: tuple[tuple[int, ...], ...]  # token ids as the model reads them, special ones included
    dimensions: int = 0  # leading ones that are kept, the rest cut and the vector normalised again; 0 keeps all

    @property
    def kind(self) -> Kind:
        return Kind.EMBEDDING

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.inputs))


class Webhook(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whom to tell of a job's end."""

    url: str
    secret: str | None = None  # whsec_<base64>; what is sent is signed with it


Spec = TextSpec | EmbeddingSpec
"""Grows with the image spec."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens counted once per job, whatever happened on the way."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Failure(msgspec.Struct, frozen=True):
    """Why a job failed, in the words of the API's errors."""

    code: str  # stable, snake_case
    message: str  # what was wrong; never the prompt


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a job, as the store keeps it and the API shows it."""

    id: str  # home region + ULID, one word
    tenant: str
    kind: Kind
    model: str
    lane: Lane
    home: str  # region whose API accepted it: record and stream live there
    place: str  # region whose queue it is on
    state: State
    created_ms: int
    deadline_ms: int  # it expires then, wherever it is
    start_ms: int | None = None  # it is published then; None is at once
    gen: int = 1  # publish generation; a message with an older one is dropped
    attempt: int = 0  # claims by an owner, takeovers included
    pos: int = 0  # content parts durable in the stream: tokens, or finished inputs
    prompt_tokens: int = 0
    started_ms: int | None = None
    ended_ms: int | None = None
    worker: str | None = None  # the last owner's name
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    failure: Failure | None = None
    metadata: dict[str, str] = {}
    webhook: bytes | None = None  # sealed: whom to tell of the end

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """One content entry of a stream: parts start+1 .. pos, tokens with their text, or the vectors of inputs."""

    start: int  # position before this entry
    pos: int  # position after it; the cursor
    text: str = ""
    token_ids: tuple[int, ...] = ()  # pos - start of them
    offsets: tuple[int, ...] = ()  # end of each token's text within text, in code points
    vectors: bytes = b""  # of an embedding job: pos - start of them, one behind the other, little-endian float32
    logprobs: bytes = b""  # where they were asked for, packed as brokers.entries has them
    digest: str = ""  # hex of the text from the stream's start to here, see ARCHITECTURE.md; vectors have none
    ts_ms: int = 0


class Scored(msgspec.Struct, frozen=True):
    """A token's log probability, and those of the best tokens in its place: what the model gave, before sampling."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # token id and log probability, best first


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """One control entry: it never moves the cursor."""

    pos: int
    n: int  # >= 1, orders the control entries of one position
    kind: str  # accepted | started | taken_over | restarted | end
    data: dict[str, Any] = {}
    ts_ms: int = 0


Entry = Content | Control


def new_job_id(home: str) -> str:
    """A fresh id; sorts by time within its home."""
    return home + str(ULID()).lower()


def nth_job_id(first: str, index: int) -> str:
    """The id of a request's job `index`, when its job 0 has this one: whoever knows one of them knows all."""
    home, ulid = first[:-_ULID_LENGTH], ULID.from_str(first[-_ULID_LENGTH:].upper())
    return home + str(ULID.from_int(int(ulid) + index)).lower()


def id_time_ms(job_id: str) -> int:
    """When the id was drawn, in unix milliseconds."""
    return round(ULID.from_str(job_id[-_ULID_LENGTH:].upper()).timestamp * 1000)


def id_age_s(job_id: str) -> float:
    """Seconds since the id was drawn."""
    return time.time() - id_time_ms(job_id) / 1000


def home_of(job_id: str) -> str | None:
    """The region a job id names, or None when it is no job id at all."""
    home, ulid = job_id[:-_ULID_LENGTH], job_id[-_ULID_LENGTH:]
    if not WORD.match(home) or len(ulid) != _ULID_LENGTH or not re.fullmatch(r"[0-9a-z]{26}", ulid):
        return None
    return home
