"""What a step of 64 sequences takes beside the model's own part: scheduling, bookkeeping, text, telling."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import IO

import msgspec
import psutil

from tests.benchmarks.engine import memory
from tests.benchmarks.engine.contender import title
from tests.benchmarks.engine.contenders.ours import options
from tests.benchmarks.engine.lineup import Bench
from tests.benchmarks.engine.process import ROOT, ContenderError, environment
from tests.benchmarks.engine.report import Goal, goals
from tests.benchmarks.engine.timed_child import Step
from tests.benchmarks.engine.workload import Arrival, kv_tokens, staggered
from workers.engine import wire
from workers.engine.protocol import Request, SamplingParams

_COUNT, _TOKENS = 64, 40
_READY_S, _STEP_S = 120, 60
_RECEIVE = 1 << 18


def run(bench: Bench) -> str:
    dtypes = ("float32",) if bench.quick else ("float32", "bfloat16")
    rows = [goal for dtype in dtypes for goal in _measured(bench, "lean", dtype)]
    return (
        f"Steps in which {_COUNT} sequences decode, medians. The model's part is its forward and the draw; the "
        "engine's is scheduling, bookkeeping, and the turn to the model; the child's is text, commands and the channel "
        f"to its parent too.\n\n{goals(rows)}"
    )


def _measured(bench: Bench, name: str, dtype: str) -> list[Goal]:
    arrivals = staggered(bench.texts, _COUNT, _TOKENS, every_s=0.0)
    steps = [step for step in _steps(bench, name, dtype, arrivals) if step.decoding == _COUNT and not step.prefilling]
    if not steps:
        raise ContenderError(f"{title(name)}, {dtype}: no step had {_COUNT} decoding sequences")
    return [
        _goal(f"the engine's share, {dtype}", [(step.engine_s - step.model_s, step.whole_s) for step in steps], 0.05),
        _goal(f"the child's share, {dtype}", [(step.whole_s - step.model_s, step.whole_s) for step in steps], 0.05),
    ]


def _goal(what: str, parts: list[tuple[float, float]], bound: float) -> Goal:
    part, whole = (median(each) for each in zip(*parts, strict=True))
    ms = f"{part * 1000:.2f} ms", f"{whole * 1000:.1f} ms"
    return Goal(what, *ms, "the step", median(a / b for a, b in parts), bound, at_least=False)


def _steps(bench: Bench, name: str, dtype: str, arrivals: list[Arrival]) -> list[Step]:
    """Of an engine's child that times itself, driven as its host does."""
    asked = options(bench.setup(name, dtype, _COUNT, kv_tokens(arrivals)))
    times = bench.bounds.logs / f"steps-{name}-{dtype}.json"
    ours, theirs = socket.socketpair()
    with ours, (bench.bounds.logs / f"timed-{name}-{dtype}.log").open("wb") as log:
        with theirs:
            child = _spawn(bench, asked, theirs, times, log)
        guard = memory.Guard(child.pid, bench.bounds.memory)
        try:
            _drive(ours, arrivals)
            bench.spent_s += sum(psutil.Process(child.pid).cpu_times()[:2])
            ours.sendall(wire.frame(wire.Stop()))
            child.wait(timeout=_STEP_S)
        finally:
            guard.stop()
            memory.end(child.pid)
            child.wait()
    return msgspec.json.decode(times.read_bytes(), type=list[Step])


def _spawn(
    bench: Bench, asked: wire.EngineOptions, channel: socket.socket, times: Path, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    fd = str(channel.fileno())
    module = [sys.executable, "-m", "tests.benchmarks.engine.timed_child", str(times)]
    arguments = [str(bench.models.folder), msgspec.json.encode(asked).decode(), fd, str(os.getpid())]
    return subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, bench.bounds.cores)), *module, *arguments],
        pass_fds=(channel.fileno(),),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment(asked.threads),
    )


def _drive(channel: socket.socket, arrivals: list[Arrival]) -> None:
    frames, left = wire.Frames(), 0
    channel.settimeout(_READY_S)
    while data := channel.recv(_RECEIVE):
        for report in wire.reports(frames.feed(data)):
            match report:
                case wire.Ready():
                    left = len(arrivals)
                    channel.settimeout(_STEP_S)
                    for number, arrival in enumerate(arrivals):
                        channel.sendall(wire.frame(wire.Submit(_request(str(number), arrival))))
                case wire.Outputs(outputs):
                    left -= sum(output.finish is not None for output in outputs)
                    if not left:
                        return
    raise ContenderError("the engine's child ended too early")


def _request(seq: str, arrival: Arrival) -> Request:
    sampling = SamplingParams(max_tokens=arrival.tokens, temperature=0.0, ignore_eos=True)
    return Request(seq, arrival.prompt, sampling=sampling)
