"""Holds a text to a JSON schema: which tokens may come next, told by llguidance.

A guide is a function of its schema and the tokens so far, so whoever takes a sequence over builds it again from those.
Building takes a millisecond, for a large schema some hundred: a thread of its own does it, and the sequence joins the
batch once its guide is there. A mask takes 50 to 200 us, and is made on another thread while the model computes.

The library's limits count work and not time, so what is too much for one worker is too much for all, and ends its own
sequence only. What has come this far was compiled at the door, under the same limits.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from workers.engine.fault import Fault
from workers.engine.protocol import Tokens

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_LIMITS = LLParserLimits(  # a step's stand for about 5 ms, those of building for about 200
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=20_000,
    verbose_errors=False,  # they would hold parts of the schema
)
_STYLE: JsonCompileOptions = {
    "whitespace_pattern": r"[ ]|\n[ ]{0,20}",  # one line or indented; small models would fill pages with more
    "lenient": False,  # a keyword that is not obeyed is refused
    "coerce_one_of": False,
}
_STACK = 256 << 20  # the library recurses along chains of $ref, 8 kB each; only what is used becomes memory
_TOO_COMPLEX = frozenset({"ParserTooComplex", "LexerTooComplex"})  # reasons to stop; of some limits only the words tell
_KEPT = 16  # compiled schemas; a copy of one is ready at once


class Guide:
    """One sequence's. One thread owns it."""

    def __init__(self, matcher: LLMatcher, masks: Executor) -> None:
        self._matcher = matcher
        self._masks = masks
        self.finished = matcher.is_stopped() and not matcher.is_error()  # nothing may come any more
        self._mask = self._next_mask()

    def mask(self) -> bytes:
        """A byte for each token of the vocabulary; 0 is one that may not come next. Raises Fault."""
        mask = self._mask.result()
        self._check()
        return mask

    def advance(self, token: int) -> None:
        """Take the token that was drawn, which the mask allowed. Raises Fault."""
        self._mask.exception()  # until it is there, its thread is at work with the matcher
        self._matcher.consume_token(token)
        self._check()
        self.finished = self._matcher.is_stopped()
        if not self.finished:
            self._mask = self._next_mask()

    def _next_mask(self) -> Future[bytes]:
        return self._masks.submit(_shielded, self._matcher.compute_logit_bias)

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        if self._matcher.stop_reason() in _TOO_COMPLEX or "too many" in self._matcher.get_error():
            raise Fault("schema_too_complex", "what the JSON schema allows here takes too long to find out")
        raise Fault("invalid_schema", "no text goes on from here that the JSON schema allows")


class GuideMaker:
    """Makes the guides of one model's sequences. `ready_fd` is readable when one is made, until it is read."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Collection[int]) -> None:
        self.ready_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tokenizer_file = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled = lru_cache(_KEPT)(self._compile)
        self._maker = deep_thread("guides")
        self._masks = ThreadPoolExecutor(1, "guide-masks")

    def make(self, schema: str, output: Tokens) -> Future[Guide]:
        """A guide that stands behind `output`; the future may hold Fault."""
        future = self._maker.submit(_shielded, self._make, schema, output)
        future.add_done_callback(lambda _: os.eventfd_write(self.ready_fd, 1))
        return future

    # --- on the maker's thread ----------------------------------------------------------------------------------

    def _make(self, schema: str, output: Tokens) -> Guide:
        matcher = self._compiled(schema).deep_copy()
        if matcher.try_consume_tokens(list(output)) < len(output):
            raise Fault("invalid_schema", "what was generated before does not follow the JSON schema")
        return Guide(matcher, self._masks)

    def _compile(self, schema: str) -> LLMatcher:
        try:
            tokenizer = self._load()
        except ValueError as error:
            raise Fault("unsupported_by_engine", "this model's tokenizer cannot be held to a schema") from error
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_STYLE)
        except ValueError as error:
            raise Fault("invalid_schema", "the JSON schema is no JSON object") from error
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise Fault("invalid_schema", "the JSON schema cannot be compiled within the limits")
        return matcher

    def _load(self) -> LLTokenizer:
        if self._tokenizer is None:  # half a second and 50 MB, which only who needs it pays for
            text = self._tokenizer_file.read_text()
            eos_ids = self._eos_ids or None
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos_ids)
        return self._tokenizer


def _shielded(work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """A library that breaks over one sequence (a panic of Rust's is a BaseException) is no end for the others."""
    try:
        return work(*args, **named)
    except Fault:
        raise
    except BaseException as error:
        log.exception("a guide failed")
        raise Fault("engine_failed", f"the guide of the text failed: {type(error).__name__}") from error


def deep_thread(name: str) -> Executor:
    """An executor of one thread that has a deep stack."""
    executor = ThreadPoolExecutor(1, name)
    before = threading.stack_size(_STACK)  # of threads that begin from here on
    try:
        executor.submit(lambda: None).result()  # begins it
    finally:
        threading.stack_size(before)
    return executor
