"""The wall clock of our processes jumps by an hour, forwards and back, while they work.

libfaketime stands between each process and its clock; the machine's own is never touched. The store runs on the true
clock, and the store's is the one that counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Tell
from tests.faults.rig import Rig, Servers
from tests.faults.sizes import sizes

_CLIENTS = 6
_LIBRARIES = tuple(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
_SITE = """
# libfaketime 0.9.10 breaks sleeping until a moment of the monotonic clock, which is how Python sleeps.
import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""
_STEPS = ("+3600", "+0", "-3600", "+0")  # seconds


@pytest.fixture(scope="module")
def clock(shared: Servers) -> Path:
    """The file that says how far the clock of the rig's processes is off."""
    if not _LIBRARIES:
        pytest.skip("libfaketime is not installed")
    path = shared.folder / "clock-offset"
    path.write_text("+0\n")
    return path


@pytest.fixture(scope="module")
def rig(shared: Servers, clock: Path) -> Iterator[Rig]:
    site = shared.folder / "clock-site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE)
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
        "LD_PRELOAD": str(_LIBRARIES[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        # What a step of the clock leaves alone on a real machine.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    # A deadline is a time of day: a step moves it by its own size, so jobs here live longer than the largest.
    with Rig(shared, "clock", env=env, default_expires_s=3 * 3600) as rig:
        yield rig


@sizes(short=1, long=5)
def test_the_clock_jumps_an_hour(rig: Rig, clock: Path, tell: Tell, times: int) -> None:
    with rig.checked() as (api_key, checker), rig.load(api_key, _CLIENTS) as load:
        for _ in range(times):
            for step in _STEPS:
                load.wait_flowing(_CLIENTS // 2, timeout_s=30)
                _set(clock, step)
                time.sleep(2.5)
                load.wait_flowing(_CLIENTS // 2, timeout_s=30)
        journal = load.stop()
        verdict = checker.check(journal.readings)
        off = sum(abs(job.created_ms / 1000 - time.time()) > 1800 for job in checker.jobs())
    assert off > 0, "no clock was stepped"
    tell(
        f"clock of all processes stepped by +1 h and -1 h, {times} times each",
        f"{verdict.jobs} jobs succeeded, {verdict.taken_over} takeovers; nobody locked out, nothing expired",
    )


def _set(clock: Path, step: str) -> None:
    fresh = clock.with_suffix(".new")
    fresh.write_text(step + "\n")
    fresh.replace(clock)
