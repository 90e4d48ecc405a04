"""Celery's execution pool: a thread per job in flight, which waits while the engine generates.

Celery's own thread pool cannot grow, shrink or terminate a task, and its stop waits for ever. Here terminate (Celery's
revoke, Flower's button) cancels the job as a client's cancel would.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from celery.concurrency.base import BasePool, apply_target

from workers import runtime


class _Applied:
    """What Celery holds of a task in the pool."""

    def __init__(self, future: Future[None], cancel: Callable[[], None]) -> None:
        self._future = future
        self._cancel = cancel

    def terminate(self, signal: int | None = None) -> None:
        self._cancel()

    def wait(self, timeout: float | None = None) -> None:
        self._future.result(timeout)


class EnginePool(BasePool):
    """Threads for as many jobs as the lanes may prefetch."""

    body_can_be_buffer = True
    signal_safe = False

    def on_start(self) -> None:
        self._executor = ThreadPoolExecutor(self.limit, thread_name_prefix="job")
        self._applied: set[_Applied] = set()

    def on_stop(self) -> None:
        # Jobs have ended or been handed back before this, see lifecycle.py.
        self._executor.shutdown(wait=True, cancel_futures=True)

    def on_terminate(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        correlation_id: str | None = None,
        **_: Any,
    ) -> _Applied:
        future = self._executor.submit(apply_target, target, args, kwargs, callback, accept_callback)
        applied = _Applied(future, lambda: _cancel(correlation_id))
        # Celery keeps a weak reference only, and terminates nothing once it is dead.
        self._applied.add(applied)
        future.add_done_callback(lambda _: self._applied.discard(applied))
        return applied

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Nothing to kill: all jobs share this process. `_Applied.terminate`, which Celery calls next, cancels."""

    def grow(self, n: int = 1) -> None:
        self._resize(self.limit + n)

    def shrink(self, n: int = 1) -> None:
        self._resize(max(1, self.limit - n))

    def _resize(self, limit: int) -> None:
        # Threads beyond a lower limit stay, idle; what a worker takes is bounded by prefetch, not by them.
        self.limit = limit
        self._executor._max_workers = max(limit, len(self._executor._threads))

    def _get_info(self) -> dict[str, Any]:
        return {**super()._get_info(), "threads": len(self._executor._threads)}


def _cancel(job_id: str | None) -> None:
    now = runtime.current()
    found = now.find(job_id) if now and job_id else None
    if now and found:
        now.ask_cancel(found[1].stream.job)
