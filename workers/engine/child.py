"""The engine's own process: `python -m workers.engine.child FOLDER OPTIONS FD PARENT_PID`, started by host.py.

It drains its commands before every step, waits for them when there is nothing to do, and dies with its parent.
"""

from __future__ import annotations

import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from workers.engine import wire
from workers.engine.build import build_embedder, build_engine, load_tokenizer, makes_vectors
from workers.engine.lifeline import die_with_parent
from workers.engine.protocol import Output, Request, Serving
from workers.engine.text import TextStage
from workers.engine.wire import EngineOptions

_STATS_S = 0.5  # between two reports; also how late a paused sequence's deadline may be noticed
_RECEIVE = 1 << 18


class Child:
    """One engine and its channel to the parent; around an engine that writes text, its text stage."""

    def __init__(self, engine: Serving[Any], text: TextStage | None, channel: socket.socket) -> None:
        self._engine = engine
        engine.on_begin = lambda seqs: self._tell(wire.Begun(seqs))
        self._text = text
        self._channel = channel
        self._watched: list[socket.socket | int] = [channel] if engine.ready_fd is None else [channel, engine.ready_fd]
        self._frames = wire.Frames()
        self._stats_due = 0.0
        self._stopping = False

    def serve(self) -> None:
        self._tell(wire.Ready(self._engine.capabilities))
        while not self._stopping:
            self._take_commands(wait_s=_STATS_S if self._engine.idle else 0)
            outputs = self._step()
            if outputs:
                self._tell(wire.Outputs(outputs))
            self._report_stats()

    def _step(self) -> list[Output]:
        outputs = self._engine.step()
        if self._text is None:
            return outputs
        released, stopped = self._text.feed(outputs)
        for seq in stopped:
            self._engine.abort(seq)
        return released

    def _take_commands(self, wait_s: float) -> None:
        """Everything that has arrived; waits for the first, or for the engine's own news, for up to `wait_s`."""
        while not self._stopping and self._channel in select.select(self._watched, [], [], wait_s)[0]:
            data = self._channel.recv(_RECEIVE)
            if not data:  # the parent is gone
                self._stopping = True
            for command in wire.commands(self._frames.feed(data)):
                self._obey(command)
            wait_s = 0

    def _obey(self, command: wire.Command) -> None:
        match command:
            case wire.Submit(request):
                if self._text and isinstance(request, Request):
                    self._text.open(request)
                self._engine.submit(request)
            case wire.Abort(seq):
                self._engine.abort(seq)
            case wire.Pause(seq):
                self._engine.pause(seq)
            case wire.Resume(seq):
                self._engine.resume(seq)
            case wire.Stop():
                self._stopping = True

    def _tell(self, report: wire.Report) -> None:
        self._channel.sendall(wire.frame(report))  # waits for the parent to read: nobody generates unheard

    def _report_stats(self) -> None:
        now = time.monotonic()
        if now >= self._stats_due:
            self._stats_due = now + _STATS_S
            self._tell(wire.StatsReport(self._engine.stats()))


def main(folder: str, options: str, fd: str, parent: str) -> None:
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, and the parent decides
    channel = socket.socket(fileno=int(fd))
    path = Path(folder)
    asked = msgspec.json.decode(options, type=EngineOptions)
    vectors = makes_vectors(path)
    engine: Serving[Any] = build_embedder(path, asked) if vectors else build_engine(path, asked)
    try:
        Child(engine, None if vectors else TextStage(load_tokenizer(path)), channel).serve()
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the parent is gone


if __name__ == "__main__":
    main(*sys.argv[1:])
