"""JSON mode and JSON schemas at the door: what no text can meet, and what would be costly to follow, is no job.

A schema is compiled here as the engine will compile it (workers/engine/guide.py, which says what the limits mean), but
over bytes instead of a model's tokens.
"""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from producers.limits import MULTIPLE_OF, SCHEMA_BYTES
from producers.problems import Problem
from producers.schemas import ResponseFormat

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_OBJECT = '{"type":"object"}'
_PARAM = "response_format.json_schema.schema"
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=20_000,
    verbose_errors=False,
)
_STYLE: JsonCompileOptions = {"whitespace_pattern": r"[ ]|\n[ ]{0,20}", "lenient": False, "coerce_one_of": False}
_STACK = 256 << 20  # the library recurses along chains of $ref, 8 kB each; only what is used becomes memory
_KEPT = 256  # verdicts
_WORDS = 200  # of the library's, in an answer
_COSTLY = re.compile(r"fuel|too (big|large|complex|many)|limit", re.IGNORECASE)
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*(-?\d{1,30}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,3})?)')


async def schema_of(asked: ResponseFormat | None) -> str | None:
    """The JSON schema that the text is held to, if it is. Raises Problem."""
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return _OBJECT
    if asked.json_schema is None:
        raise Problem("missing_field", "response_format.json_schema is missing", param="response_format.json_schema")
    return await _checked(bytes(asked.json_schema.schema))


async def _checked(raw: bytes) -> str:
    if len(raw) > SCHEMA_BYTES:
        raise Problem("schema_too_complex", f"the schema has more than {SCHEMA_BYTES} bytes", param=_PARAM)
    try:
        schema = raw.decode()
    except UnicodeDecodeError:
        raise Problem("invalid_text", "the schema is not UTF-8", param=_PARAM) from None
    _check_multiples(schema)
    wrong = await asyncio.get_running_loop().run_in_executor(_thread(), _fault, schema)
    if wrong is not None:
        code = "schema_too_complex" if _COSTLY.search(wrong) else "invalid_schema"
        raise Problem(code, f"the schema cannot be followed: {' '.join(wrong.split())[:_WORDS]}", param=_PARAM)
    return schema


def _check_multiples(schema: str) -> None:
    """The library counts no work for these, and takes seconds over large ones."""
    for found in _MULTIPLE_OF.finditer(schema):
        _, digits, _ = Decimal(found.group(1)).normalize().as_tuple()
        if int("".join(map(str, digits))) > MULTIPLE_OF:
            raise Problem(
                "schema_too_complex", f"multipleOf has more than {MULTIPLE_OF} units of its last digit", param=_PARAM
            )


@lru_cache(_KEPT)
def _fault(schema: str) -> str | None:
    """Why a schema cannot be followed, in the library's words."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_STYLE)
    except ValueError as error:
        return str(error)
    matcher = LLMatcher(_tokenizer(), grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what can only be refused once it begins
    return (matcher.get_error() or "no text begins as it wants") if matcher.is_error() else None


@lru_cache(maxsize=1)
def _tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


@lru_cache(maxsize=1)
def _thread() -> Executor:
    """One thread with a deep stack: the library recurses, and whoever asks again and again waits here for himself."""
    executor = ThreadPoolExecutor(1, "schemas")
    before = threading.stack_size(_STACK)  # of threads that begin from here on
    try:
        executor.submit(lambda: None).result()
    finally:
        threading.stack_size(before)
    return executor
