"""JSON mode and JSON schemas at the door: what no text can meet, and what would be costly to follow, is no job."""

from __future__ import annotations

from producers.limits import SCHEMA_BYTES
from producers.problems import Problem
from producers.schema_checker import SchemaChecker
from producers.schemas import ResponseFormat

_OBJECT = '{"type":"object"}'
_PARAM = "response_format.json_schema.schema"
_WORDS = 200  # of the library's, in an answer


async def schema_of(checker: SchemaChecker, asked: ResponseFormat | None) -> str | None:
    """The JSON schema that the text is held to, if it is. Raises Problem."""
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return _OBJECT
    if asked.json_schema is None:
        raise Problem("missing_field", "response_format.json_schema is missing", param="response_format.json_schema")
    schema = _readable(bytes(asked.json_schema.schema))
    verdict = await checker.fault(schema)
    if verdict is not None:
        code = "schema_too_complex" if verdict.costly else "invalid_schema"
        words = " ".join(verdict.words.split())[:_WORDS]
        raise Problem(code, f"the schema cannot be followed: {words}", param=_PARAM)
    return schema


def _readable(raw: bytes) -> str:
    if len(raw) > SCHEMA_BYTES:
        raise Problem("schema_too_complex", f"the schema has more than {SCHEMA_BYTES} bytes", param=_PARAM)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise Problem("invalid_text", "the schema is not UTF-8", param=_PARAM) from None
