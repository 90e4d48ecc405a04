"""The engine's process and its host: what is asked is answered, and no death goes unnoticed on either side."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from tests.unit.engine.driving import Record, prompt
from workers.engine.host import EngineGone, EngineHost, EngineOptions, EngineStartError
from workers.engine.protocol import Output, Request, SamplingParams
from workers.engine.scripted import CRASH_CODE
from workers.weights.scripted import create_scripted_model

OPTIONS = EngineOptions(slots=4, kv_tokens=4096, threads=1, device="cpu", dtype="float32")
PATIENCE_S = 20.0
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)


class Listener:
    """Collects what a host tells, and waits for it."""

    def __init__(self) -> None:
        self.record = Record()
        self.pieces: dict[str, str] = {}
        self.exits: queue.Queue[str] = queue.Queue()
        self._news = threading.Condition()

    def on_outputs(self, outputs: list[Output]) -> None:
        with self._news:
            self.record.take(outputs)
            for output in outputs:
                self.pieces[output.seq] = self.pieces.get(output.seq, "") + "".join(output.pieces)
            self._news.notify_all()

    def wait(self, condition: Callable[[Record], bool]) -> None:
        with self._news:
            assert self._news.wait_for(lambda: condition(self.record), PATIENCE_S), "nothing came"

    def wait_end(self, seq: str) -> Output:
        self.wait(lambda record: seq in record.ends)
        return self.record.ends[seq]

    def wait_tokens(self, seq: str, count: int) -> None:
        self.wait(lambda record: len(record.tokens.get(seq, [])) >= count)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def host(scripted_folder: Path, listener: Listener) -> Iterator[EngineHost]:
    host = EngineHost(scripted_folder, OPTIONS, listener.on_outputs, listener.exits.put)
    host.start()
    yield host
    host.stop()


def ask(seq: str, text: str = "hello", sampling: SamplingParams | None = None) -> Request:
    return Request(seq, prompt(text), sampling=sampling or SamplingParams(max_tokens=40))


def test_tokens_come_back_with_their_text(host: EngineHost, listener: Listener) -> None:
    host.submit(ask("a"))
    assert listener.wait_end("a").finish == "length"
    assert len(listener.record.tokens["a"]) == 40
    text = bytes(listener.record.tokens["a"]).decode(errors="ignore")
    assert listener.pieces["a"] == text


def test_many_threads_may_submit_at_once(host: EngineHost, listener: Listener) -> None:
    threads = [threading.Thread(target=host.submit, args=(ask(str(n), f"number {n}"),)) for n in range(40)]
    for thread in threads:
        thread.start()
    for n in range(40):
        assert listener.wait_end(str(n)).finish == "length"


def test_a_stop_string_ends_the_text_and_frees_the_slot(host: EngineHost, listener: Listener) -> None:
    host.submit(ask("a", sampling=LONG))
    listener.wait_tokens("a", 60)
    host.abort("a")
    whole = bytes(listener.record.tokens["a"]).decode(errors="ignore")
    stop = whole[20:26]
    host.submit(ask("b", sampling=SamplingParams(max_tokens=4000, stop=(stop,))))
    assert listener.wait_end("b").finish == "stop"
    assert listener.pieces["b"] == whole[: whole.index(stop)]
    host.submit(ask("c"))
    listener.wait_end("c")


def test_abort_pause_and_resume_reach_the_engine(host: EngineHost, listener: Listener) -> None:
    host.submit(ask("a", "!slow@2", sampling=LONG))
    listener.wait_tokens("a", 3)
    host.pause("a")
    host.submit(ask("after the pause"))
    listener.wait_end("after the pause")
    assert "a" not in listener.record.ends
    seen = len(listener.record.tokens["a"])
    host.resume("a")
    listener.wait_tokens("a", seen + 3)
    host.abort("a")
    assert listener.wait_end("a").finish == "cancelled"


def test_bad_requests_fail_alone(host: EngineHost, listener: Listener) -> None:
    host.submit(ask("good", "!slow@1", sampling=SamplingParams(max_tokens=60)))
    host.submit(Request("no such token", (100_000,)))
    host.submit(Request("no such output", (1,), output=(-7,)))
    host.submit(Request("empty", ()))
    host.submit(ask("breaks", "!raise@5"))
    codes = {seq: listener.wait_end(seq).error_code for seq in ("no such token", "no such output", "empty", "breaks")}
    assert codes == {
        "no such token": "bad_token",
        "no such output": "bad_token",
        "empty": "empty_prompt",
        "breaks": "engine_failed",
    }
    assert listener.wait_end("good").finish == "length"
    assert host.alive


def test_an_end_token_ends_with_stop(host: EngineHost, listener: Listener) -> None:
    host.submit(ask("a", "!eos@16"))
    assert listener.wait_end("a").finish == "stop"
    assert len(listener.record.tokens["a"]) == 16


def test_stats_are_pushed(host: EngineHost, listener: Listener) -> None:
    host.submit(ask("a"))
    listener.wait_end("a")
    give_up = threading.Event()
    threading.Timer(PATIENCE_S, give_up.set).start()
    while not give_up.is_set():
        stats = host.stats()
        if stats is not None and stats.generated_tokens == 40:
            assert stats.slots == 4
            return
        give_up.wait(0.05)
    raise AssertionError("no stats came")


def test_a_crash_is_told_and_the_host_starts_again(host: EngineHost, listener: Listener) -> None:
    host.submit(ask("a", "!crash@8", sampling=LONG))
    assert str(CRASH_CODE) in listener.exits.get(timeout=PATIENCE_S)
    assert not host.alive
    assert host.pid is None
    assert len(listener.record.tokens["a"]) == 8, "what came before the crash is not lost"
    with pytest.raises(EngineGone):
        host.submit(ask("b"))
    host.start()
    host.submit(ask("b"))
    assert listener.wait_end("b").finish == "length"


def test_a_killed_child_is_told(host: EngineHost, listener: Listener) -> None:
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)
    assert "-9" in listener.exits.get(timeout=PATIENCE_S)


def test_stop_is_quiet_and_may_be_called_again(host: EngineHost, listener: Listener) -> None:
    child = psutil.Process(host.pid)
    host.stop()
    host.stop()
    assert not child.is_running()
    assert not host.alive
    assert listener.exits.empty()


def test_an_engine_that_hangs_is_killed_by_stop(host: EngineHost, listener: Listener) -> None:
    host.submit(ask("a", "!hang@3"))
    listener.wait_tokens("a", 2)
    child = psutil.Process(host.pid)
    host.stop(timeout=0.2)
    assert not child.is_running()
    assert listener.exits.empty()


def test_submit_does_not_wait_for_an_engine_that_hangs(host: EngineHost, listener: Listener) -> None:
    host.submit(ask("a", "!hang@3"))
    listener.wait_tokens("a", 2)
    for n in range(200):
        host.submit(Request(str(n), (1,) * 4000))  # far more than the channel's buffer holds
    host.stop(timeout=0)


def test_a_failing_consumer_does_not_end_the_stream(scripted_folder: Path, listener: Listener) -> None:
    def fail_once(outputs: list[Output]) -> None:
        listener.on_outputs(outputs)
        if any(output.seq == "a" for output in outputs):
            raise RuntimeError("a consumer's fault")

    host = EngineHost(scripted_folder, OPTIONS, fail_once, listener.exits.put)
    host.start()
    try:
        host.submit(ask("a"))
        host.submit(ask("b"))
        listener.wait_end("b")
        assert host.alive
    finally:
        host.stop()


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path, listener: Listener) -> None:
    (tmp_path / "lingbot.json").write_text('{"engine": "phlogiston", "max_context": 8}')
    host = EngineHost(tmp_path, OPTIONS, listener.on_outputs, listener.exits.put)
    with pytest.raises(EngineStartError, match="phlogiston"):
        host.start()
    assert not host.alive
    assert listener.exits.empty()


def test_a_start_that_takes_too_long_is_given_up(scripted_folder: Path, listener: Listener) -> None:
    host = EngineHost(scripted_folder, OPTIONS, listener.on_outputs, listener.exits.put)
    with pytest.raises(EngineStartError, match="not ready"):
        host.start(timeout=0.001)
    assert host.pid is None


def test_ctrl_c_does_not_end_the_child(host: EngineHost, listener: Listener) -> None:
    assert host.pid is not None
    os.kill(host.pid, signal.SIGINT)
    host.submit(ask("a"))
    listener.wait_end("a")


def test_the_thread_that_started_the_host_may_end(scripted_folder: Path, listener: Listener) -> None:
    host = EngineHost(scripted_folder, OPTIONS, listener.on_outputs, listener.exits.put)
    starter = threading.Thread(target=host.start)
    starter.start()
    starter.join()
    try:
        host.submit(ask("a"))
        listener.wait_end("a")
        assert listener.exits.empty()
    finally:
        host.stop()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "hanging"])
def test_the_child_dies_with_its_parent(scripted_folder: Path, busy: bool) -> None:
    text = "!hang@0" if busy else "!eos@0"
    script = f"""
        import sys, time
        from pathlib import Path
        from workers.engine.host import EngineHost, EngineOptions
        from workers.engine.protocol import Request
        options = EngineOptions(4, 4096, 1, "cpu", "float32")
        host = EngineHost(Path({str(scripted_folder)!r}), options, lambda _: None, lambda _: None)
        host.start()
        host.submit(Request("a", {prompt(text)!r}))
        print("pid", host.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", dedent(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline().split()[1]))
    parent.kill()
    parent.wait()
    child.wait(timeout=PATIENCE_S)
    assert not child.is_running()


UNSENDABLE = {
    "seed beyond 64 bits": Request("a", (1,), sampling=SamplingParams(seed=2**64)),
    "half a surrogate": Request("a", (1,), sampling=SamplingParams(stop=("\ud83d",))),
    "wrong type": Request("a", ("one",)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", sorted(UNSENDABLE))
def test_what_cannot_be_sent_is_raised_to_who_sent_it(host: EngineHost, listener: Listener, kind: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        host.submit(UNSENDABLE[kind])
    host.submit(ask("b"))
    listener.wait_end("b")


def test_sampling_numbers_beyond_reason_fail_alone(tiny_folder: Path, listener: Listener) -> None:
    host = EngineHost(tiny_folder, OPTIONS, listener.on_outputs, listener.exits.put)
    host.start()
    try:
        host.submit(Request("hot", (1,), sampling=SamplingParams(temperature=1e308, max_tokens=3)))
        host.submit(Request("nan", (1,), sampling=SamplingParams(repetition_penalty=0, max_tokens=3)))
        assert listener.wait_end("hot").finish == "length"
        assert listener.wait_end("nan").error_code == "numeric_error"
    finally:
        host.stop()


def test_a_step_that_fails_for_all_ends_the_child_with_its_reason(tmp_path: Path, listener: Listener) -> None:
    create_scripted_model(tmp_path, "broken", {"delay_ms": 1e30})  # more than can be slept
    host = EngineHost(tmp_path / "broken", OPTIONS, listener.on_outputs, listener.exits.put)
    host.start()
    host.submit(ask("a"))
    assert "OverflowError" in listener.exits.get(timeout=PATIENCE_S)
    assert not host.alive
