"""A prompt that begins like an earlier one: its first token with and without what is kept of that one."""

from __future__ import annotations

from statistics import median

from tests.benchmarks.engine.contender import title
from tests.benchmarks.engine.lineup import Bench, Lineup
from tests.benchmarks.engine.report import Goal, goals
from tests.benchmarks.engine.workload import Arrival

_NAMES = ("vllm", "llamacpp", "generic", "lean")
_SHARED, _OWN = 1000, 24  # tokens
_ROUNDS = 3
_BOUND = 0.2


def run(bench: Bench) -> str:
    dtypes = ("float32",) if bench.quick else ("float32", "bfloat16")
    rows = [goal for dtype in dtypes for goal in _measured(bench, dtype)]
    return (
        f"Two prompts that share {_SHARED:,} tokens and then go {_OWN} ways of their own: milliseconds to the first "
        f"token of the second, against those of the first; medians of {_rounds(bench)}. Others' ratios are there to "
        f"compare; the goal is ours.\n\n{goals(rows)}"
    )


def _rounds(bench: Bench) -> int:
    return 1 if bench.quick else _ROUNDS


def _measured(bench: Bench, dtype: str) -> list[Goal]:
    cold: dict[str, list[float]] = {}
    warm: dict[str, list[float]] = {}
    with Lineup(bench, _NAMES, dtype, slots=2, kv_tokens=4096, prefix_tokens=4096) as lineup:
        for number in range(_rounds(bench)):
            shared = bench.texts.of_length(_SHARED, 1000 + number)
            for seen, own in ((cold, 2000 + number), (warm, 3000 + number)):
                arrival = Arrival(0.0, shared + bench.texts.of_length(_OWN, own), 4)
                for name, runs in lineup.turns([arrival], rounds=1).items():
                    seen.setdefault(name, []).append(runs[0][0].ttft_s)
    return [_goal(f"{title(name)}, {dtype}", median(warm[name]), median(cold[name])) for name in cold if name in warm]


def _goal(what: str, warm_s: float, cold_s: float) -> Goal:
    ms = f"{warm_s * 1000:,.0f} ms", f"{cold_s * 1000:,.0f} ms"
    return Goal(what, *ms, "the same without", warm_s / cold_s, _BOUND, at_least=False)
