"""The engine's benchmark, where it could mislead or do harm."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.benchmarks.engine.__main__ import PARTS, measured
from tests.benchmarks.engine.child import _check
from tests.benchmarks.engine.lineup import Bench
from tests.benchmarks.engine.memory import Guard, end, peak_bytes
from tests.benchmarks.engine.models import Models
from tests.benchmarks.engine.process import Bounds
from tests.benchmarks.engine.report import Goal, figures, percentile, update
from tests.benchmarks.engine.workload import Arrival, Texts, Trace, kv_tokens
from workers.engine.cache import SlotCache

_HOLDS_300_MB = (
    "held = bytearray(300 << 20)\nfor i in range(0, len(held), 4096): held[i] = 1\nprint(1, flush=True)\ninput()"
)


def test_rates_count_from_the_first_arrival_to_the_last_token() -> None:
    run = [Trace(due_s=1.0, times_s=[1.5, 2.0], generated=2), Trace(due_s=1.5, times_s=[3.0, 5.0], generated=2)]

    seen = figures([run])

    assert seen.rate == pytest.approx(4 / 4.0)
    assert seen.ttft == (0.5, 1.5)
    assert seen.gap == (0.5, 2.0)


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]

    assert (percentile(values, 50), percentile(values, 99), percentile(values[:3], 99)) == (50.0, 99.0, 3.0)
    assert math.isnan(percentile([], 50))


@pytest.mark.parametrize("tokens", [8, 32, 48, 56])
def test_the_room_that_is_asked_for_holds_all_sequences_at_once(tokens: int) -> None:
    arrivals = [Arrival(0.0, (1,) * length, tokens) for length in range(16, 32)]
    cache = SlotCache(layers=1, slots=16, kv_tokens=0, device=torch.device("cpu"), exact=True)

    assert 16 * cache.row_length(31 + tokens) <= kv_tokens(arrivals)


def test_who_writes_less_than_was_asked_for_is_not_measured() -> None:
    arrival = Arrival(0.0, (1, 2), tokens=3)

    _check([arrival], [Trace(0.0, [0.1, 0.2], generated=3)])
    with pytest.raises(RuntimeError, match="2 tokens instead of 3"):
        _check([arrival], [Trace(0.0, [0.1, 0.2], generated=2)])


@pytest.mark.parametrize(("ratio", "at_least", "met"), [(9.9, True, False), (10.0, True, True), (10.1, False, False)])
def test_a_goal_that_is_missed_is_told(ratio: float, at_least: bool, met: bool) -> None:
    row = Goal("what", "1", "2", "other", ratio, 10.0, at_least=at_least).row

    assert ("yes" in row) == met
    assert ("**no**" in row) != met


def test_a_section_that_is_measured_again_leaves_the_others(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# head\n<!-- a -->\nold a\n<!-- /a -->\nbetween\n<!-- b -->\nold b\n<!-- /b -->\n")

    update(page, {"b": "new b \\1\n"})
    update(page, {"b": "newer b\n"})

    text = "# head\n<!-- a -->\nold a\n<!-- /a -->\nbetween\n<!-- b -->\nnewer b\n<!-- /b -->\n"
    assert page.read_text() == text
    with pytest.raises(ValueError, match="no place for c"):
        update(page, {"c": "x"})


def test_a_contender_that_takes_too_much_memory_is_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", _HOLDS_300_MB], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    guard = Guard(process.pid, limit=100 << 20)
    try:
        assert process.wait(timeout=30) != 0
        guard.stop()
        assert guard.reason is not None
        assert "took more than" in guard.reason
    finally:
        end(process.pid)


def test_peak_memory_is_that_of_all_its_processes() -> None:
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    process = subprocess.Popen(
        [sys.executable, "-c", parent, _HOLDS_300_MB], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert peak_bytes(process.pid) > 300 << 20
    finally:
        end(process.pid)
        process.communicate()


def test_a_part_that_breaks_says_so_and_the_others_are_still_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: Bench) -> str:
        raise KeyError("lean")

    monkeypatch.setitem(PARTS, "bare", breaks)
    bench = Bench(cast(Texts, None), cast(Models, None), Bounds((0,), 0, tmp_path), quick=True)

    assert measured(bench, "bare").startswith("Not measured: 'lean'\n\n")
