"""Everybody at 1, 4, 16 and 64 sequences that come one after the other: tokens/s, first token, next token, memory."""

from __future__ import annotations

from collections.abc import Callable

from tests.benchmarks.engine.contender import title
from tests.benchmarks.engine.lineup import Bench, Lineup
from tests.benchmarks.engine.report import Figures, Goal, figures, goals, milliseconds, table
from tests.benchmarks.engine.workload import Arrival, kv_tokens, staggered

_NAMES = ("generate", "padded", "manager", "vllm", "llamacpp", "llamacpp-q4", "generic", "lean", "exact")
_ONE_BY_ONE = "generate"
_TOKENS = 32
_EVERY_S = 0.03
_ROUNDS = {1: 2, 4: 1, 16: 2, 64: 1}
_ROUNDS_ONE_BY_ONE = {1: 2, 4: 1, 16: 1}  # 64 would take minutes, and be what 16 is

Loads = dict[int, list[Arrival]]
Seen = dict[int, dict[str, Figures]]


def run(bench: Bench) -> str:
    dtypes = ("float32",) if bench.quick else ("float32", "bfloat16")
    return _INTRODUCTION + "".join(_measured(bench, dtype) for dtype in dtypes)


_INTRODUCTION = f"""Sequences of 16 to 32 tokens come {_EVERY_S * 1000:.0f} ms apart on average
and write {_TOKENS} each. Times are in milliseconds, p50 / p99; those to the first token include waiting for a place.
`generate` one by one is the usual Celery worker, padded batches are made of what waits; both tell tokens through a
streamer. vLLM runs eagerly. llama.cpp has the same values in f32 and bf16, and once as they were published (Q4_1: a
fraction of the memory traffic, so not the same work); its keys and values are f16. At 64, one by one is left out: it is
what it is at 16. Memory is the sum of the processes' greatest resident sizes, mapped weights included.

"""


def _measured(bench: Bench, dtype: str) -> str:
    levels = [16] if bench.quick else list(_ROUNDS)
    loads = {count: staggered(bench.texts, count, _TOKENS, every_s=_EVERY_S) for count in levels}
    most = max(levels)
    with Lineup(bench, _NAMES, dtype, most, kv_tokens(loads[most])) as lineup:
        seen = {count: _level(bench, lineup, count, loads) for count in levels}
        memory = {name: running.peak_bytes() for name, running in lineup.running.items()}
    return f"**{dtype}**\n\n" + _tables(seen, memory) + goals(_goals(dtype, seen.get(16, {})))


def _level(bench: Bench, lineup: Lineup, count: int, loads: Loads) -> dict[str, Figures]:
    others = [name for name in lineup.running if name != _ONE_BY_ONE]
    turns = lineup.turns(loads[count], 1 if bench.quick else _ROUNDS[count], others)
    if count in _ROUNDS_ONE_BY_ONE:
        turns |= lineup.turns(loads[count], 1 if bench.quick else _ROUNDS_ONE_BY_ONE[count], [_ONE_BY_ONE])
    return {name: figures(runs) for name, runs in turns.items()}


def _tables(seen: Seen, memory: dict[str, int]) -> str:
    names = [name for name in _NAMES if name in memory]
    first, last = min(seen), max(seen)

    def rows(cell: Callable[[Figures], str]) -> list[list[str]]:
        return [[title(name), *(cell(seen[n][name]) if name in seen[n] else "-" for n in seen)] for name in names]

    def growth(name: str) -> str:
        return f"{seen[last][name].rate / seen[first][name].rate:.1f}" if name in seen[last] else "-"

    counts = [str(count) for count in seen]
    rates = rows(lambda f: f"{f.rate:,.1f}")
    for name, row in zip(names, rates, strict=True):
        row += [growth(name), f"{memory[name] / 2**20:,.0f}"]
    return (
        table(["tokens/s at", *counts, f"{last} against {first}", "peak memory, MiB"], rates)
        + table(["to the first token at", *counts], rows(lambda f: milliseconds(*f.ttft)))
        + table(["between tokens at", *counts], rows(lambda f: milliseconds(*f.gap)))
    )


def _goals(dtype: str, at16: dict[str, Figures]) -> list[Goal]:
    wanted = (("lean", "generate", 10.0), ("lean", "manager", 1.5), ("lean", "vllm", 0.8), ("exact", "lean", 0.7))
    return [
        Goal(
            f"tokens/s at 16: {title(ours)}, {dtype}",
            f"{at16[ours].rate:,.1f}",
            f"{at16[other].rate:,.1f}",
            title(other),
            at16[ours].rate / at16[other].rate,
            bound,
        )
        for ours, other, bound in wanted
        if ours in at16 and other in at16
    ]
