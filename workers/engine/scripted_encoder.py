"""An encoder for tests: an input's vector is a pure function of its tokens.

With options["directives"] an input can order faults, wherever it is in its job:

    !raise@0  fails alone        !slow@MS  its step sleeps      !hang@0  the step never returns
    !crash@0  the process dies   !oom@0    the worker dies with it
"""

from __future__ import annotations

import math
import os
import signal
import time
from array import array
from hashlib import blake2b

from tokenizers import Tokenizer

from workers.engine.fault import Fault
from workers.engine.protocol import Tokens
from workers.engine.scripted import CRASH_CODE, OOM_S, ORDER, Options

DIMENSIONS = 16


class ScriptedEncoder:
    """Its time is that of the card's delay and of the inputs' orders."""

    dimensions = DIMENSIONS
    budget = 256

    def __init__(self, tokenizer: Tokenizer, max_input: int, options: Options) -> None:
        self.max_input = max_input
        self.vocab_size = tokenizer.get_vocab_size()
        self._tokenizer = tokenizer
        self._options = options

    def run(self, inputs: list[Tokens], dimensions: list[int]) -> list[bytes | Fault]:
        orders = [self._orders(tokens) for tokens in inputs]
        delay_ms = self._options.delay_ms + max(each.get("slow", 0) for each in orders)
        time.sleep(delay_ms / 1000)
        for each in orders:
            _die(each)
        vectors = [scripted_vector(tokens, kept) for tokens, kept in zip(inputs, dimensions, strict=True)]
        fault = Fault("engine_failed", "the script says that this input fails")
        return [fault if "raise" in each else vector for each, vector in zip(orders, vectors, strict=True)]

    def _orders(self, tokens: Tokens) -> dict[str, int]:
        if not self._options.directives:
            return {}
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return {name: int(at) for name, at in ORDER.findall(text)}


def scripted_vector(tokens: Tokens, kept: int = 0) -> bytes:
    """The vector of an input, of length 1."""
    digest = blake2b(repr(tokens).encode(), digest_size=DIMENSIONS).digest()
    numbers = [byte - 127.5 for byte in digest][: kept or None]
    length = math.hypot(*numbers)
    return array("f", [number / length for number in numbers]).tobytes()


def _die(orders: dict[str, int]) -> None:
    if "crash" in orders:
        os._exit(CRASH_CODE)
    if "oom" in orders:
        time.sleep(OOM_S)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(CRASH_CODE)
    if "hang" in orders:
        time.sleep(3600)
