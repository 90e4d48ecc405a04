"""Our engine against the bare model: 16 sequences that are all there at the start, in one padded batch."""

from __future__ import annotations

from statistics import median

from tests.benchmarks.engine.contender import title
from tests.benchmarks.engine.lineup import Bench, Lineup
from tests.benchmarks.engine.report import Goal, goals, rate
from tests.benchmarks.engine.workload import kv_tokens, staggered

_COUNT = 16
_TOKENS = 48
_ROUNDS = 3


def run(bench: Bench) -> str:
    dtypes = ("float32",) if bench.quick else ("float32", "bfloat16")
    rows = [goal for dtype in dtypes for goal in _measured(bench, dtype)]
    return (
        f"{_COUNT} prompts at once, {_TOKENS} tokens each, tokens/s with the prompts' time in it; medians of "
        f"{_rounds(bench)} turns. The bare model has no arrivals, no sampling but argmax, no text, no process around "
        f"it.\n\n{goals(rows)}"
    )


def _rounds(bench: Bench) -> int:
    return 1 if bench.quick else _ROUNDS


def _measured(bench: Bench, dtype: str) -> list[Goal]:
    arrivals = staggered(bench.texts, _COUNT, _TOKENS, every_s=0.0)
    with Lineup(bench, ("bare", "generic", "lean"), dtype, _COUNT, kv_tokens(arrivals)) as lineup:
        turns = lineup.turns(arrivals, _rounds(bench))
    rates = {name: [rate(each) for each in runs] for name, runs in turns.items()}
    return [
        Goal(
            f"{title(name)}, {dtype}",
            f"{median(rates[name]):,.1f}",
            f"{median(rates['bare']):,.1f}",
            title("bare"),
            median(ours / bare for ours, bare in zip(rates[name], rates["bare"], strict=True)),
            bound,
        )
        for name, bound in (("generic", 0.95), ("lean", 0.95))
        if name in rates and "bare" in rates
    ]
