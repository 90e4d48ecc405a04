"""vLLM's own processes: they end with ours, their death is seen, and they cost nothing while nobody asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import msgspec
import psutil
import pytest

from tests.engines.conftest import OPTIONS
from tests.unit.engine.driving import ask
from tests.unit.engine.test_host import Listener
from workers.engine.host import EngineHost, EngineStartError
from workers.engine.protocol import SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("vllm_installed"), pytest.mark.timeout(300)]

VLLM = msgspec.structs.replace(OPTIONS, engine="vllm")
LONG = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def host(llama_folder: Path, listener: Listener) -> Iterator[EngineHost]:
    host = EngineHost(llama_folder, VLLM, listener.on_outputs, listener.exits.put)
    host.start()
    yield host
    host.stop()


def wait(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.05)


def below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


def test_tokens_come_back_with_their_text_and_an_idle_engine_rests(host: EngineHost, listener: Listener) -> None:
    assert host.capabilities is not None
    assert (host.capabilities.engine, host.capabilities.lacks) == (
        "vllm",
        ("pause", "keyed_sampling", "exact", "json_schema"),
    )
    host.submit(ask("a", sampling=SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)))
    assert listener.wait_end("a").finish == "length"
    assert len(listener.record.tokens["a"]) == 40
    assert listener.pieces["a"]
    assert host.pid is not None
    child = psutil.Process(host.pid)
    before = child.cpu_times()
    time.sleep(3)
    after = child.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.3


def test_a_core_that_dies_ends_the_child_and_a_new_one_goes_on(host: EngineHost, listener: Listener) -> None:
    host.submit(ask("a", sampling=LONG))
    listener.wait_tokens("a", 5)
    assert host.pid is not None
    processes = below(host.pid)
    core = next(process for process in processes if "EngineCore" in " ".join(process.cmdline()))
    core.kill()
    assert "VllmGoneError" in listener.exits.get(timeout=20)
    wait(lambda: gone(processes))
    host.start()
    listener.record.tokens.clear()
    host.submit(ask("b", sampling=SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)))
    assert listener.wait_end("b").finish == "length"


def test_a_core_that_hangs_is_seen_by_the_age_of_its_step(host: EngineHost, listener: Listener) -> None:
    host.submit(ask("a", sampling=LONG))
    listener.wait_tokens("a", 5)
    assert host.pid is not None
    for process in below(host.pid):
        process.send_signal(signal.SIGSTOP)
    wait(lambda: host.silent_s > 2)
    processes = below(host.pid)
    host.kill()
    listener.exits.get(timeout=20)
    wait(lambda: gone(processes))


def test_nothing_is_left_when_the_worker_is_killed(llama_folder: Path) -> None:
    code = dedent(
        f"""
        import time
        from pathlib import Path
        import msgspec
        from tests.engines.test_vllm_process import VLLM
        from workers.engine.host import EngineHost
        host = EngineHost(Path({str(llama_folder)!r}), VLLM, lambda outputs: None, print)
        host.start()
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    processes = below(worker.pid)
    assert len(processes) >= 3  # the child, vLLM's core, vLLM's worker
    worker.kill()
    worker.wait()
    wait(lambda: gone(processes))


def test_a_build_for_another_device_says_so(llama_folder: Path) -> None:
    elsewhere = msgspec.structs.replace(VLLM, device="cuda")
    host = EngineHost(llama_folder, elsewhere, lambda _: None, lambda _: None)
    with pytest.raises(EngineStartError, match="this vLLM is built for"):
        host.start()
