"""The engine beside others, in one run on the same cores and model: `make bench-engine`.

    python -m tests.benchmarks.engine [--quick] [--only PART ...] [--write docs/engine.md]

On a quiet machine: with --write it refuses to begin on another. Each part may be measured in a run of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.benchmarks.engine.lineup import Bench, Others
from tests.benchmarks.engine.models import MODEL, Models
from tests.benchmarks.engine.parts import bare, context, equality, neighbours, overhead, peers, prefix, speculation
from tests.benchmarks.engine.process import ROOT, Bounds
from tests.benchmarks.engine.report import update
from tests.benchmarks.engine.workload import Texts
from tests.benchmarks.report import machine

PARTS: dict[str, Callable[[Bench], str]] = {
    "peers": peers.run,
    "bare": bare.run,
    "context": context.run,
    "prefix": prefix.run,
    "speculation": speculation.run,
    "neighbours": neighbours.run,
    "overhead": overhead.run,
    "equality": equality.run,
}
_QUIET = 0.1  # cores that others may use
_LISTEN_S = 3.0


def main() -> None:
    asked = _arguments()
    if asked.write and not asked.anyway and (busy := _busy_cores()) > _QUIET:
        sys.exit(f"others use {busy:.2f} cores now: figures would mean little (--anyway measures all the same)")
    with tempfile.TemporaryDirectory(prefix="lingbot-bench-engine-") as scratch:
        bench = _bench(asked, Path(scratch))
        for part in asked.only or PARTS:
            text = measured(bench, part)
            print(f"## {part}\n\n{text}", flush=True)
            if asked.write:
                update(asked.write, {part: text})


def measured(bench: Bench, part: str) -> str:
    """A part's section, with what it took and who was left out. A part that fails says why in place of its figures."""
    bench.left_out.clear()
    others, began = Others(bench), time.monotonic()
    try:
        body = PARTS[part](bench)
    except Exception as error:  # noqa: BLE001 (whatever it is, the other parts' figures are worth having)
        traceback.print_exc()
        body = f"Not measured: {' '.join(str(error).split()) or type(error).__name__}\n\n"
    took = f"{machine()}, on {len(bench.bounds.cores)} of them; {time.monotonic() - began:.0f} s"
    notes = "".join(f"- {' '.join(reason.split())}\n" for reason in bench.left_out)
    return f"{body}{notes}Measured with {took}; others used {others.cores():.2f} cores meanwhile.\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.engine")
    parser.add_argument("--quick", action="store_true", help="two minutes: f32 only, fewer sizes, one round")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--write", type=Path, help="put the sections into this page")
    parser.add_argument("--anyway", action="store_true", help="write even though the machine is not quiet")
    parser.add_argument("--cores", help="to run on, as 1 or 2,3; the last one if it is not given")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB that one contender may take")
    parser.add_argument("--models", type=Path, default=Path(".lingbot/models"), help="folder with the real model")
    return parser.parse_args()


def _bench(asked: argparse.Namespace, scratch: Path) -> Bench:
    usable = sorted(os.sched_getaffinity(0))
    cores = tuple(int(core) for core in asked.cores.split(",")) if asked.cores else (usable[-1],)
    models = Models(asked.models.resolve(), ROOT / ".lingbot" / "cache", scratch)
    if not models.folder.exists():
        sys.exit(f"{models.folder} is missing; `make model` brings {MODEL}")
    logs = scratch / "logs"
    logs.mkdir()
    bounds = Bounds(cores, int(asked.memory * 2**30), logs)
    return Bench(Texts(models.folder), models, bounds, asked.quick)


def _busy_cores() -> float:
    return float(psutil.cpu_percent(interval=_LISTEN_S)) / 100 * (psutil.cpu_count() or 1)


if __name__ == "__main__":
    main()
