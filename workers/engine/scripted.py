"""A model for tests: its text is a pure function of prompt, seed, choice and position.

It works with the vocabulary of any byte-level tokenizer and emits one byte a token, so that every character beyond
ASCII arrives in pieces. Phrases have eight bytes each: position p is byte p % 8 of phrase p // 8, whatever came
before, so resumed, re-batched and taken-over sequences are equal to the byte. One that is held to a schema says the
same where the schema allows it, and else a byte that it allows.

With options["directives"] a prompt can order faults (positions count output tokens):

    !eos@N  ends by itself at N        !raise@N  fails alone at N       !slow@MS  sleeps in each of its steps
    !crash@N  the process dies at N    !hang@N   the step never returns
    !oom@N  the worker dies with it, as when a container runs out of memory
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from struct import pack
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import msgspec
from tokenizers import Tokenizer

from workers.engine.fault import Fault
from workers.engine.loop import Drawn
from workers.engine.protocol import TokenLogprobs
from workers.engine.scheduler import Plan
from workers.engine.sequence import Sequence
from workers.engine.speculation import Costs

if TYPE_CHECKING:
    from workers.engine.guide import Guide

CRASH_CODE = 70
OOM_S = 0.05  # memory takes a moment to fill up
ORDER = re.compile(r"!(crash|raise|hang|slow|eos|oom)@(\d+)")
_WIDTH = 8
_PHRASES = tuple(  # of _WIDTH bytes each
    phrase.encode()
    for phrase in (
        "the sea ",
        "a lamp, ",
        "we read ",
        "rivers, ",
        "slowly. ",
        "an echo ",
        "lantern ",
        "to rest ",
        "naïve, ",
        "für x, ",
        "文字, ",
        "한국. ",
        "my 😀 ",
        "🌊🌙",
        "so 1+1\n ",
        "at noon ",
    )
)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The card's `options` for a scripted model."""

    delay_ms: float = 0.0  # slept in every step, to simulate a model's pace
    directives: bool = False  # obey the orders above; for fault tests only


@dataclass(slots=True, frozen=True)
class _Script:
    """What a sequence will say, and what its prompt orders."""

    key: bytes
    orders: dict[str, int]

    def byte(self, position: int) -> int:
        frame, offset = divmod(position, _WIDTH)
        digest = blake2b(pack("<Q", frame), key=self.key, digest_size=1).digest()
        return _PHRASES[digest[0] % len(_PHRASES)][offset]

    def other(self, position: int, allowed: list[int]) -> int:
        digest = blake2b(pack("<q", ~position), key=self.key, digest_size=4).digest()
        return allowed[int.from_bytes(digest, "little") % len(allowed)]


class ScriptedModel:
    """Its tokens need no cache, so a plan's moves mean nothing to it."""

    name = "scripted"
    prefill_chunk = 256
    costs: Costs | None = None
    guesses = joins = False
    exact = True

    def __init__(self, tokenizer: Tokenizer, *, max_context: int, eos_id: int | None, options: Options) -> None:
        self.max_context = max_context
        self.vocab_size = tokenizer.get_vocab_size()
        self._tokenizer = tokenizer
        self._byte_ids = _byte_ids(tokenizer)
        self._eos_id = eos_id
        self._options = options
        self._scripts: WeakKeyDictionary[Sequence, _Script] = WeakKeyDictionary()

    def row_length(self, tokens: int) -> int:
        return tokens

    def run(self, plan: Plan) -> list[Drawn]:
        ready = [*plan.decode, *(chunk.sequence for chunk in plan.prefill if chunk.completes)]
        self._pace(ready)
        return [self._drawn(sequence) for sequence in ready]

    def _pace(self, ready: list[Sequence]) -> None:
        slow = max((self._script(sequence).orders.get("slow", 0) for sequence in ready), default=0)
        delay = self._options.delay_ms + slow
        if delay > 0:
            time.sleep(delay / 1000)

    def _drawn(self, sequence: Sequence) -> Drawn:
        token, asked = self._draw(sequence), sequence.request.sampling.logprobs
        if asked is None or isinstance(token, Fault):
            return Drawn(sequence, token)
        return Drawn(sequence, token, TokenLogprobs(0.0, ((token, 0.0),) if asked else ()))  # nothing else can come

    def _draw(self, sequence: Sequence) -> int | Fault:
        position, script = len(sequence.output), self._script(sequence)
        if script.orders.get("crash") == position:
            os._exit(CRASH_CODE)
        if script.orders.get("oom") == position:
            time.sleep(OOM_S)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(CRASH_CODE)
        if script.orders.get("hang") == position:
            time.sleep(3600)
        if script.orders.get("raise") == position:
            return Fault("engine_failed", "the script says that this sequence fails here")
        if self._eos_id is not None and script.orders.get("eos") == position:
            return self._eos_id
        if sequence.guide is not None:
            return self._guided(sequence.guide, script, position)
        return self._byte_ids[script.byte(position)]

    def _guided(self, guide: Guide, script: _Script, position: int) -> int | Fault:
        """What the script says where the guide allows it, else something that it does; the end as soon as it may be."""
        try:
            mask = guide.mask()
        except Fault as fault:
            return fault
        if self._eos_id is not None and mask[self._eos_id]:
            return self._eos_id
        token = self._byte_ids[script.byte(position)]
        return token if mask[token] else script.other(position, [other for other in self._byte_ids if mask[other]])

    def _script(self, sequence: Sequence) -> _Script:
        script = self._scripts.get(sequence)
        if script is None:
            script = self._scripts[sequence] = self._read(sequence)
        return script

    def _read(self, sequence: Sequence) -> _Script:
        request = sequence.request
        key = blake2b(repr((request.prompt, request.sampling.seed, request.choice)).encode(), digest_size=32).digest()
        if not self._options.directives:
            return _Script(key, {})
        text = self._tokenizer.decode(list(request.prompt), skip_special_tokens=True)
        return _Script(key, {name: int(at) for name, at in ORDER.findall(text)})


def _byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The token id of each byte. ValueError when the vocabulary lacks one."""
    vocabulary = tokenizer.get_vocab()
    try:
        return [vocabulary[symbol] for symbol in byte_symbols()]
    except KeyError:
        raise ValueError("a scripted model needs a byte-level tokenizer with all 256 bytes") from None


@lru_cache(maxsize=1)
def byte_symbols() -> tuple[str, ...]:
    """How byte-level tokenizers (GPT-2's table) spell each byte: printable ones as themselves, the rest from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return tuple(chr(byte if byte in printable else 0x100 + hidden.index(byte)) for byte in range(256))
