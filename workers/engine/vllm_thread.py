"""vLLM's AsyncLLM on a thread of its own. Sequences go in; what becomes of them waits for `take()`.

    this process: our loop's thread  <- events -  vLLM's thread (asyncio)  <- ZeroMQ -  VLLM::EngineCore - VLLM::Worker

The thread lives as long as the process: its end would be the end of vLLM's processes (lifeline.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from workers.engine import vllm_setup
from workers.engine.fault import NOT_A_NUMBER
from workers.engine.protocol import Request, TokenLogprobs, Tokens

log = logging.getLogger(__name__)

_LOOK_S = 0.5  # how often a core is looked after that nobody waits for
_SHUTDOWN_S = 2.0


class Event(NamedTuple):
    """What became of a sequence."""

    key: str  # under which it was added
    tokens: Tokens = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str | None = None  # vLLM's words: "stop" | "length" | "abort" | "error" | ...
    error: tuple[str, str] | None = None  # code and message


@dataclass(slots=True)
class Progress:
    """What the core has told of its steps; written on vLLM's thread."""

    steps: int = 0
    kv_share: float = 0.0  # of the blocks
    prefilled: int = 0
    reused: int = 0
    heard: float = 0.0  # time.monotonic() of the last step

    def record(self, scheduler: Any, iteration: Any) -> None:
        self.heard = time.monotonic()
        if scheduler is not None:
            self.steps += 1
            self.kv_share = scheduler.kv_cache_usage
        if iteration is not None:
            self.prefilled += iteration.prompt_token_stats.computed
            self.reused += iteration.prompt_token_stats.local_cache_hit


class VllmThread:
    """One AsyncLLM. `start()` once; `add`, `drop` and `take` belong to one thread."""

    def __init__(self, make_params: Callable[[Request], Any]) -> None:
        self.progress = Progress()
        self.dead: str | None = None  # why vLLM does no more
        self.ready_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._make_params = make_params
        self._events: deque[Event] = deque()
        self._signalled = False
        self._corrupted = 0  # outputs that were no number
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stop = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, args: Any) -> None:
        """Load the model; returns when vLLM is ready. Raises what it raises."""
        started: deque[BaseException | None] = deque()
        settled = threading.Event()

        def live() -> None:
            try:
                asyncio.run(self._live(args, started, settled))
            except BaseException as error:  # noqa: BLE001 - it is told to who waits for the start
                started.append(error)
                settled.set()

        self._thread = threading.Thread(target=live, name="vllm", daemon=True)
        self._thread.start()
        settled.wait()
        if error := started.popleft():
            raise error

    def add(self, request: Request, key: str) -> None:
        """Go on with a sequence under a key that was never used before."""
        self._call(self._begin, request, key)

    def drop(self, key: str) -> None:
        """End it there. Events that are under way may still come."""
        self._call(self._cancel, key)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take(self) -> list[Event]:
        """What has happened since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.ready_fd)  # before the events: what comes later signals again
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        if self._thread is not None:
            self._call(self._stop.set)
            self._thread.join(timeout=4 * _SHUTDOWN_S)
        os.close(self.ready_fd)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: vLLM is dead, which the next step says
                self._loop.call_soon_threadsafe(function, *args)

    # --- on vLLM's thread ---------------------------------------------------------------------------------------

    async def _live(self, args: Any, started: deque[BaseException | None], settled: threading.Event) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.get_running_loop()
        self._llm = AsyncLLM.from_engine_args(args, stat_loggers=[_stat_logger(self.progress)])
        started.append(None)
        settled.set()
        try:
            while not await self._stopped_within(_LOOK_S):
                if self._llm.errored:
                    self._die("vLLM's core process has ended")
        finally:
            self._llm.shutdown(timeout=_SHUTDOWN_S)
            del self._llm  # here: its destructor does not work any more when the interpreter ends

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        return self._stop.is_set()

    def _begin(self, request: Request, key: str) -> None:
        task = asyncio.get_running_loop().create_task(self._generate(request, key), name=key)
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def _cancel(self, key: str) -> None:
        if task := self._tasks.get(key):
            task.cancel()  # generate() tells the core

    async def _generate(self, request: Request, key: str) -> None:
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            tokens = tokens_input([*request.prompt, *request.output], cache_salt=self._salt(request))
            params = self._make_params(request)
            async for output in self._llm.generate(tokens, params, key, priority=request.priority):
                self._corrupted += output.metrics.is_corrupted
                self._put(_event(key, output, request.sampling.logprobs))
        except EngineDeadError:
            self._die("vLLM's core process failed")
        except vllm_setup.client_errors() as error:
            log.warning("vLLM refuses a sequence: %s", type(error).__name__)
            self._put(Event(key, error=("bad_request", f"vLLM refuses it: {type(error).__name__}.")))
        except Exception as error:
            log.exception("vLLM fails a sequence")
            self._put(Event(key, error=("engine_failed", f"vLLM failed: {type(error).__name__}.")))

    def _salt(self, request: Request) -> str | None:
        """Whose beginnings it shares: its tenant's, and none from before NaN was last scrubbed out of the cache."""
        return ".".join(filter(None, (request.tenant, str(self._corrupted or "")))) or None

    def _die(self, reason: str) -> None:
        self.dead = self.dead or reason
        self._signal()

    def _put(self, event: Event) -> None:
        self._events.append(event)
        if not self._signalled:  # once for all sequences of a step: their tasks run one after the other
            self._signalled = True
            asyncio.get_running_loop().call_soon(self._signal)

    def _signal(self) -> None:
        self._signalled = False
        os.eventfd_write(self.ready_fd, 1)


def _event(key: str, output: Any, top: int | None) -> Event:
    if output.metrics.is_corrupted:  # told because VLLM_COMPUTE_NANS_IN_LOGITS is set
        return Event(key, error=(NOT_A_NUMBER.code, NOT_A_NUMBER.message))
    choice = output.outputs[0]
    return Event(key, tuple(choice.token_ids), _logprobs(choice, top), choice.finish_reason)


def _logprobs(choice: Any, top: int | None) -> tuple[TokenLogprobs, ...]:
    """vLLM gives a dictionary for each token: the best ones by rank, and the token itself."""
    if top is None or not choice.logprobs:
        return ()
    pairs = zip(choice.token_ids, choice.logprobs, strict=True)
    return tuple(TokenLogprobs(given[token].logprob, _best(given, top)) for token, given in pairs)


def _best(given: dict[int, Any], top: int) -> tuple[tuple[int, float], ...]:
    ranked = sorted(given.items(), key=lambda item: item[1].rank or 0)
    return tuple((token, scored.logprob) for token, scored in ranked[:top])


def _stat_logger(progress: Progress) -> Callable[[Any, int], Any]:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            progress.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Logger
