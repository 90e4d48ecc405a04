"""Whose texts are those of `generate`: alone, in a batch, and interrupted; greedily, by dtype and mode.

This is no race: each core has a contender of its own, until all have been heard.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import msgspec

from tests.benchmarks.engine.contender import CONTENDERS, title
from tests.benchmarks.engine.lineup import Bench
from tests.benchmarks.engine.process import ContenderError, Running
from tests.benchmarks.engine.report import table
from tests.benchmarks.engine.workload import Arrival, Trace, kv_tokens

_REFERENCE = "generate"
_NAMES = (_REFERENCE, "generic", "lean", "exact")
_PROMPTS, _QUICK_PROMPTS = 100, 8
_TOKENS, _SLOTS = 20, 16
_LOW, _HIGH = 2, 0  # lanes
_BURSTS, _BURST_S, _GUEST_TOKENS = 12, 1.0, 4
_TIMEOUT_S = 600

Written = list[list[int]]


@dataclass(frozen=True)
class Heard:
    """The texts of one contender, in the order of the prompts; of `generate` only those alone."""

    alone: Written
    batched: Written
    interrupted: Written
    interruptions: int  # sequences that lost their place in the batch at least once


def run(bench: Bench) -> str:
    dtypes = ("float32",) if bench.quick else ("float32", "bfloat16")
    wanted = [(name, dtype) for dtype in dtypes for name in _NAMES if dtype in CONTENDERS[name].dtypes]
    free: SimpleQueue[int] = SimpleQueue()
    cores = sorted(os.sched_getaffinity(0))
    for core in cores:
        free.put(core)
    with ThreadPoolExecutor(len(cores)) as pool:
        heard = list(pool.map(lambda who: _on_a_core(bench, who, free), wanted))
    return (
        f"{_prompts(bench)} prompts. "
        + _INTRODUCTION
        + _report({who: each for who, each in zip(wanted, heard, strict=True) if each})
    )


_INTRODUCTION = f"""Short ones, {_TOKENS} tokens each, greedily. Batched: {_SLOTS} at a time.
Interrupted: in such batches of each three sequences one is paused and resumed, one is ended and given in again with its
tokens, as another worker would, and one is left to those of a higher lane, which come in bursts and send others back to
the queue; nothing is reused of what was computed before.

"""


def _prompts(bench: Bench) -> int:
    return _QUICK_PROMPTS if bench.quick else _PROMPTS


def _on_a_core(bench: Bench, who: tuple[str, str], free: SimpleQueue[int]) -> Heard | None:
    core = free.get()
    try:
        return _heard(bench, *who, core)
    except ContenderError as error:
        bench.left_out.append(str(error))
        return None
    finally:
        free.put(core)


def _heard(bench: Bench, name: str, dtype: str, core: int) -> Heard:
    prompts = bench.texts.questions(_prompts(bench))
    arrivals = [Arrival(0.0, prompt, _TOKENS, priority=_LOW) for prompt in prompts]
    room = kv_tokens([max(arrivals, key=lambda arrival: len(arrival.prompt))] * _SLOTS)
    setup = msgspec.structs.replace(bench.setup(name, dtype, _SLOTS, room), threads=1)
    with bench.running(setup, msgspec.structs.replace(bench.bounds, cores=(core,))) as running:
        alone = [running.serve([arrival])[0].tokens for arrival in arrivals]
        if name == _REFERENCE:
            return Heard(alone, [], [], 0)
        batched = [trace.tokens for trace in running.serve(arrivals, _TIMEOUT_S)]
        interrupted = _interrupted(running, arrivals)
    written = [trace.tokens for trace in interrupted]
    return Heard(alone, batched, written, sum(trace.begun > 1 for trace in interrupted))


def _interrupted(running: Running, arrivals: Sequence[Arrival]) -> list[Trace]:
    guests = [
        Arrival(burst * _BURST_S, arrivals[number].prompt, _GUEST_TOKENS, priority=_HIGH)
        for burst in range(_BURSTS)
        for number in range(min(_SLOTS - 1, len(arrivals)))
    ]
    broken = [_broken(number, arrival) for number, arrival in enumerate(arrivals)]
    return running.serve([*broken, *guests], _TIMEOUT_S)[: len(arrivals)]


def _broken(number: int, arrival: Arrival) -> Arrival:
    at = 1 + number * 7 % (_TOKENS - 2)  # anywhere in the text
    if number % 3 == 0:
        return msgspec.structs.replace(arrival, pause_at=at)
    return msgspec.structs.replace(arrival, hand_over_at=at) if number % 3 == 1 else arrival


def _report(heard: dict[tuple[str, str], Heard]) -> str:
    head = ["share equal to", "`generate`: alone", "batched", "interrupted", "itself alone: batched", "interrupted"]
    rows = []
    for (name, dtype), texts in heard.items():
        reference = heard.get((_REFERENCE, dtype))
        if name == _REFERENCE or reference is None:
            continue
        ways = texts.alone, texts.batched, texts.interrupted
        same = [_share(way, reference.alone) for way in ways] + [_share(way, texts.alone) for way in ways[1:]]
        rows.append([f"{title(name)}, {dtype} ({texts.interruptions} interrupted)", *(f"{each:.0%}" for each in same)])
    return table(head, rows)


def _share(written: Written, reference: Written) -> float:
    return sum(ours == theirs for ours, theirs in zip(written, reference, strict=True)) / len(reference)
