"""Compiles JSON schemas in a process of its own, for schema_checker.py: `python -m producers.schema_process`.

What comes in on standard input and goes out on standard output are texts, each behind its length in bytes (four,
big-endian): a schema in, and out what is wrong with it, which is nothing at all where it can be followed. One empty
text comes first, when the process is ready.

A schema is compiled here as the engine will compile it (workers/engine/guide.py, which says what the limits mean), but
over bytes instead of a model's tokens. Limits that count work do not cover everything: a few bytes of `allOf` with
several `multipleOf` are an automaton without end. So what takes more than its time, or more memory than there is,
ends this process, by the kernel's hand, and the next schema gets a new one.
"""

from __future__ import annotations

import resource
import signal
import struct
import sys
import threading
from typing import TYPE_CHECKING, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LENGTH = struct.Struct("!I")
_CPU_S = 0.5  # of one schema; ordinary ones take a millisecond, the largest that are sensible a hundred
_MEMORY = 3 << 28  # bytes of address space, half of which the process takes when it starts
_STACK = 256 << 20  # the library recurses along chains of $ref, 8 kB each; only what is used becomes memory
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=20_000,
    verbose_errors=False,
)
_STYLE: JsonCompileOptions = {"whitespace_pattern": r"[ ]|\n[ ]{0,20}", "lenient": False, "coerce_one_of": False}


def fault(schema: str, tokenizer: LLTokenizer) -> str:
    """Why a schema cannot be followed, in the library's words; empty where it can."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_STYLE)
    except ValueError as error:
        return str(error)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what can only be refused once it begins
    return _plain(matcher.get_error()) if matcher.is_error() else ""


def _plain(error: str) -> str:
    """The library's words without its own advice."""
    return "no text meets it" if error.startswith("NoExtension") else error.partition(" Enable ")[0]


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Until the other end is closed."""
    tokenizer = LLTokenizer("byte")
    _put(sink, "")
    while head := source.read(LENGTH.size):
        schema = source.read(*LENGTH.unpack(head)).decode()
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)  # its signal, SIGPROF, ends a process that does not expect it
        wrong = fault(schema, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _put(sink, wrong)


def _put(sink: BinaryIO, text: str) -> None:
    data = text.encode()
    sink.write(LENGTH.pack(len(data)) + data)
    sink.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the API too, and that closes our input
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it is meant to die
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
