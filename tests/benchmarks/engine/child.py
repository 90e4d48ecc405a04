"""A contender's process: `python -m tests.benchmarks.engine.child SETUP FD`, started by process.py.

It reads a JSON line for each run from its input and answers on the descriptor; what its libraries print goes elsewhere.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

import msgspec

from tests.benchmarks.engine.contender import CONTENDERS, Contender, Setup
from tests.benchmarks.engine.workload import Arrival, Trace


class Ready(msgspec.Struct, frozen=True, tag=True):
    """It is loaded."""


class Served(msgspec.Struct, frozen=True, tag=True):
    traces: list[Trace]


Answer = Ready | Served

_arrivals = msgspec.json.Decoder(list[Arrival])


def main(setup: str, fd: str) -> None:
    asked = msgspec.json.decode(setup, type=Setup)
    module = import_module(f"tests.benchmarks.engine.contenders.{CONTENDERS[asked.name].module}")
    contender: Contender = module.load(asked)
    with os.fdopen(int(fd), "wb", buffering=0) as channel:
        _tell(channel.fileno(), Ready())
        for line in sys.stdin.buffer:
            arrivals = _arrivals.decode(line)
            traces = contender.serve(arrivals)
            _check(arrivals, traces)
            _tell(channel.fileno(), Served(traces))
    contender.close()


def _check(arrivals: list[Arrival], traces: list[Trace]) -> None:
    """Whoever does less than was asked for would be fast."""
    for number, (arrival, trace) in enumerate(zip(arrivals, traces, strict=True)):
        if not trace.times_s or trace.generated != arrival.tokens:
            raise RuntimeError(f"sequence {number} has {trace.generated} tokens instead of {arrival.tokens}")


def _tell(fd: int, answer: Answer) -> None:
    data = memoryview(msgspec.json.encode(answer) + b"\n")
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main(*sys.argv[1:])
