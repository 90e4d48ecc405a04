"""A long prompt comes while others write: how long they wait for their next tokens, and it for its first."""

from __future__ import annotations

from tests.benchmarks.engine.contender import title
from tests.benchmarks.engine.lineup import Bench, Lineup
from tests.benchmarks.engine.report import Goal, goals, percentile
from tests.benchmarks.engine.workload import Arrival, Trace, staggered

_NAMES = ("vllm", "generic", "lean")
_OTHERS = 8
_LONG = 2000  # tokens
_TOKENS = {"float32": 160, "bfloat16": 200}
_COMES_AFTER_S = {"float32": 3.0, "bfloat16": 1.5}
_SETTLING = 5  # first gaps of each, in which the others' own prompts are computed


def run(bench: Bench) -> str:
    dtypes = ("float32",) if bench.quick else ("float32", "bfloat16")
    rows = [goal for dtype in dtypes for goal in _measured(bench, dtype)]
    return (
        f"{_OTHERS} sequences write; then a prompt of {_LONG:,} tokens comes. First, p99 between two tokens of the "
        "others until it has its first, against their p50 before it came; then its own time to the first token against "
        f"that alone. Others' rows are there to compare; the goals are ours.\n\n{goals(rows)}"
    )


def _measured(bench: Bench, dtype: str) -> list[Goal]:
    others = staggered(bench.texts, _OTHERS, _TOKENS[dtype], every_s=0.0)
    long = bench.texts.of_length(_LONG, 5000)
    names = ("vllm", "lean") if bench.quick else _NAMES
    kv_tokens = (_OTHERS + 1) * (_LONG + max(_TOKENS.values()))
    found: list[Goal] = []
    with Lineup(bench, names, dtype, _OTHERS + 1, kv_tokens) as lineup:
        alone = lineup.turns([Arrival(0.0, long, 2)], rounds=1)
        beside = lineup.turns([*others, Arrival(_COMES_AFTER_S[dtype], long, 2)], rounds=1)
    for name in beside:
        *neighbours, guest = beside[name][0]
        found += _goals(f"{title(name)}, {dtype}", neighbours, guest, alone[name][0][0])
    return found


def _goals(who: str, neighbours: list[Trace], guest: Trace, alone: Trace) -> list[Goal]:
    before = percentile(_gaps(neighbours, 0.0, guest.due_s), 50)
    during = percentile(_gaps(neighbours, guest.due_s, guest.times_s[0]), 99)
    return [
        _goal(f"{who}: others' next tokens, p99", during, before, "their p50 before", 2.0),
        _goal(f"{who}: its first token", guest.ttft_s, alone.ttft_s, "alone", 3.0),
    ]


def _goal(what: str, ours_s: float, reference_s: float, against: str, bound: float) -> Goal:
    ms = f"{ours_s * 1000:,.0f} ms", f"{reference_s * 1000:,.0f} ms"
    return Goal(what, *ms, against, ours_s / reference_s, bound, at_least=False)


def _gaps(traces: list[Trace], start_s: float, end_s: float) -> list[float]:
    """Between tokens, of the gaps that have a part in that time."""
    return [
        after - before
        for trace in traces
        for before, after in list(zip(trace.times_s, trace.times_s[1:], strict=False))[_SETTLING:]
        if after > start_s and before < end_s
    ]
