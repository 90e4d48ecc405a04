"""A contender's process, seen from the bench: pinned to its cores, watched, held still while others have their turn."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
import psutil

from tests.benchmarks.engine import memory
from tests.benchmarks.engine.child import Answer, Ready, Served
from tests.benchmarks.engine.contender import Setup, interpreter, title
from tests.benchmarks.engine.workload import Arrival, Trace

ROOT = Path(__file__).resolve().parents[3]
_LOAD_S = 180
_LAST_WORDS = 400  # characters

_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


class ContenderError(RuntimeError):
    """A contender cannot be had, or has failed."""


class Bounds(msgspec.Struct, frozen=True):
    """Where contenders run, and how much they may take."""

    cores: tuple[int, ...]
    memory: int  # bytes, of each of them
    logs: Path  # what they print


class Running:
    """One contender. Ends with the block."""

    def __init__(self, setup: Setup, bounds: Bounds) -> None:
        self.name = setup.name
        self._log = bounds.logs / f"{setup.name}-{setup.dtype}-{time.monotonic_ns()}.log"
        python = interpreter(ROOT, setup.name)
        if python is None:
            raise ContenderError(f"left out: {title(setup.name)} is not installed here (`make test-vllm` installs it)")
        if memory.available_bytes() < bounds.memory:
            raise ContenderError(f"left out: less than {bounds.memory / 2**30:.0f} GiB of memory are free")
        self._channel, theirs = os.pipe()
        with self._log.open("wb") as log:
            self._process = _spawn(python, setup, bounds, theirs, log)
        os.close(theirs)
        self._buffer = bytearray()
        self._guard = memory.Guard(self._process.pid, bounds.memory)

    def __enter__(self) -> Running:
        try:
            self._answer(_LOAD_S)
        except ContenderError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.stop()
        with contextlib.suppress(OSError), self._input:
            self.go_on()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        memory.end(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        os.close(self._channel)

    def serve(self, arrivals: Sequence[Arrival], timeout_s: float = 300) -> list[Trace]:
        """Raises ContenderError when it fails or takes longer."""
        try:
            self._input.write(msgspec.json.encode(arrivals) + b"\n")
            self._input.flush()
        except OSError:
            raise self._failed("it has ended") from None
        answer = self._answer(timeout_s)
        assert isinstance(answer, Served)
        return answer.traces

    def peak_bytes(self) -> int:
        return memory.peak_bytes(self._process.pid)

    def cpu_s(self) -> float:
        """Processor time that it and its own have taken."""
        return sum(sum(process.cpu_times()[:2]) for process in memory.tree(self._process.pid))

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """It runs within the block only: what polls while it waits would take the others' core."""
        self.go_on()
        try:
            yield
        finally:
            self._each(psutil.Process.suspend)

    def go_on(self) -> None:
        self._each(psutil.Process.resume)

    def _each(self, act: object) -> None:
        assert callable(act)
        for process in memory.tree(self._process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                act(process)

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _answer(self, timeout_s: float) -> Ready | Served:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._channel], [], [], left)[0]:
                raise self._failed(f"it took longer than {timeout_s:.0f} s")
            data = os.read(self._channel, 1 << 20)
            if not data:
                raise self._failed("it has ended")
            self._buffer += data
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = bytearray(rest)
        return _answers.decode(line)

    def _failed(self, what: str) -> ContenderError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)  # for its last words
        words = self._log.read_text(errors="replace").strip()[-_LAST_WORDS:]
        return ContenderError(f"{title(self.name)} failed, {self._guard.reason or what}: {words}")


def _spawn(python: Path, setup: Setup, bounds: Bounds, fd: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    child = [str(python), "-m", "tests.benchmarks.engine.child", msgspec.json.encode(setup).decode(), str(fd)]
    return subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, bounds.cores)), *child],
        pass_fds=(fd,),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment(setup.threads),
        start_new_session=True,
    )


def environment(threads: int) -> dict[str, str]:
    """The same for all: how glibc keeps memory for the next step, on large pages, is what our own engine runs with."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
