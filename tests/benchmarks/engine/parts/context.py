"""How the cost of a prompt and of a token grows with the context, and with the batch beside it."""

from __future__ import annotations

from tests.benchmarks.engine.contender import title
from tests.benchmarks.engine.lineup import Bench, Lineup
from tests.benchmarks.engine.report import milliseconds, percentile, table
from tests.benchmarks.engine.workload import Arrival, Trace

_NAMES = ("vllm", "llamacpp", "generic", "lean")
_LENGTHS = (128, 1024, 4096)
_TOKENS = 16
_BATCHES = (1, 4, 8)


def run(bench: Bench) -> str:
    lengths = (128, 1024) if bench.quick else _LENGTHS
    dtypes = ("float32",) if bench.quick else ("float32", "bfloat16")
    return "".join(_alone(bench, dtype, lengths) + _beside_others(bench, dtype, lengths) for dtype in dtypes)


def _alone(bench: Bench, dtype: str, lengths: tuple[int, ...]) -> str:
    most = lengths[-1] + _TOKENS
    seen: dict[str, list[Trace]] = {}
    with Lineup(bench, _NAMES, dtype, slots=1, kv_tokens=-(-most // 256) * 256) as lineup:
        for length in lengths:
            arrival = Arrival(0.0, bench.texts.of_length(length, number=length), _TOKENS)
            for name, runs in lineup.turns([arrival], rounds=1).items():
                seen.setdefault(name, []).append(runs[0][0])
    head = ["one sequence", *(f"{length:,}" for length in lengths)]
    rows = [[title(name), *(_cell(trace) for trace in traces)] for name, traces in seen.items()]
    return f"**{dtype}**: milliseconds to the first token / between tokens, by tokens of context\n\n" + table(
        head, rows
    )


def _beside_others(bench: Bench, dtype: str, lengths: tuple[int, ...]) -> str:
    """The prompts are the same, and kept after the first: what is measured is decoding."""
    most = lengths[-1] + 2 * _TOKENS
    rows = [[f"{title('lean')}, {batch} sequences"] for batch in _BATCHES]
    kv_tokens = _BATCHES[-1] * most
    with Lineup(bench, ("lean",), dtype, _BATCHES[-1], kv_tokens, prefix_tokens=2 * lengths[-1]) as lineup:
        for length in lengths:
            arrival = Arrival(0.0, bench.texts.of_length(length, number=length), _TOKENS)
            lineup.turns([arrival], rounds=1)
            for row, batch in zip(rows, _BATCHES, strict=True):
                for runs in lineup.turns([arrival] * batch, rounds=1).values():
                    row.append(milliseconds(percentile([gap for trace in runs[0] for gap in trace.gaps_s], 50)))
    return table(["milliseconds between tokens", *(f"{length:,}" for length in lengths)], rows)


def _cell(trace: Trace) -> str:
    return milliseconds(trace.ttft_s, percentile(trace.gaps_s, 50))
