"""JSON schemas are compiled apart: what kills that process is refused, and the next one is asked a new one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from producers import schema_process
from producers.guides import schema_of
from producers.limits import SCHEMA_BYTES
from producers.problems import Problem
from producers.schema_checker import SchemaChecker
from producers.schemas import NamedSchema, ResponseFormat
from workers.engine import guide

GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ENDLESS = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]}


@pytest.fixture
async def checker() -> AsyncIterator[SchemaChecker]:
    checker = SchemaChecker()
    yield checker
    await checker.close()


async def asked(checker: SchemaChecker, schema: Any) -> str | None:
    """The code it is refused with."""
    raw = schema if isinstance(schema, bytes) else json.dumps(schema).encode()
    try:
        await schema_of(checker, ResponseFormat(type="json_schema", json_schema=NamedSchema(schema=raw)))  # type: ignore[arg-type]
    except Problem as problem:
        return problem.code
    return None


REFUSED = {
    "unsatisfiable": ({"type": "integer", "minimum": 5, "maximum": 3}, "invalid_schema"),
    "nothing is in it": ({"enum": []}, "invalid_schema"),
    "of no type": ({"type": "nonesuch"}, "invalid_schema"),
    "no schema": ([], "invalid_schema"),
    "leads nowhere": ({"$ref": "#"}, "invalid_schema"),
    "loops": (
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        "invalid_schema",
    ),
    "of another place": ({"$ref": "file:///etc/passwd"}, "invalid_schema"),
    "would not be obeyed": ({"type": "array", "uniqueItems": True}, "invalid_schema"),
    "looks around": ({"type": "string", "pattern": "^(?=a)b$"}, "invalid_schema"),
    "looks back": ({"type": "string", "pattern": r"^(a)\1$"}, "invalid_schema"),
    "explodes": (
        {"allOf": [{"anyOf": [{"properties": {f"{x}{n}": {}}} for x in "ab"], "type": "object"} for n in range(14)]},
        "schema_too_complex",
    ),
    "deep": (json.loads('{"items":' * 300 + "{}" + "}" * 300), "schema_too_complex"),
    "endless": (ENDLESS, "schema_too_complex"),
    "long": ({"enum": ["x" * SCHEMA_BYTES]}, "schema_too_complex"),
    "no UTF-8": (b'{"const": "\xff"}', "invalid_text"),
}


@pytest.mark.parametrize("which", REFUSED)
async def test_a_schema_that_no_text_can_be_held_to_is_refused(checker: SchemaChecker, which: str) -> None:
    schema, code = REFUSED[which]
    assert await asked(checker, schema) == code
    assert await asked(checker, GOOD) is None


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|a)*b$", "^((a{0,100}){0,100}){0,100}$", "^.*.*.*.*=.*$"])
async def test_a_pattern_that_ruins_other_engines_is_none_here(checker: SchemaChecker, pattern: str) -> None:
    assert await asked(checker, {"type": "string", "pattern": pattern}) is None


async def test_json_mode_is_a_schema_and_text_is_none(checker: SchemaChecker) -> None:
    assert await schema_of(checker, ResponseFormat(type="json_object")) == '{"type":"object"}'
    assert await schema_of(checker, ResponseFormat(type="text")) is None
    assert await schema_of(checker, None) is None


async def test_what_was_said_once_is_not_asked_again(checker: SchemaChecker) -> None:
    assert await asked(checker, ENDLESS) == "schema_too_complex"
    assert await asked(checker, ENDLESS) == "schema_too_complex"
    assert checker._process is None  # it died of the first one, and was not needed for the second


async def test_many_are_checked_side_by_side(checker: SchemaChecker) -> None:
    schemas = [GOOD | {"title": str(n)} for n in range(20)] + [ENDLESS, {"enum": []}]
    verdicts = await asyncio.gather(*(asked(checker, schema) for schema in schemas))
    assert verdicts == [None] * 20 + ["schema_too_complex", "invalid_schema"]


async def test_a_caller_that_goes_away_leaves_no_answer_behind(checker: SchemaChecker) -> None:
    await asked(checker, GOOD)
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(asked(checker, {"enum": []}))
    while not checker._turn.locked():
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asked(checker, GOOD | {"title": "after"}) is None


def test_the_door_and_the_engine_compile_alike() -> None:
    names = [name for name in dir(guide._LIMITS) if not name.startswith("_")]
    assert "max_grammar_size" in names
    limits = [{name: getattr(made, name) for name in names} for made in (guide._LIMITS, schema_process._LIMITS)]
    assert limits[0] == limits[1]
    assert guide._STYLE == schema_process._STYLE
