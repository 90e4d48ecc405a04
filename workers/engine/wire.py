"""What parent and child say to each other: msgpack structs in frames with a four-byte length."""

from __future__ import annotations

import os
from pathlib import Path
from struct import Struct

import msgspec

from workers.engine.protocol import Ask, Capabilities, Output, Stats


class EngineOptions(msgspec.Struct, frozen=True):
    """How to run a model."""

    slots: int  # sequences in one batch
    kv_tokens: int  # KV budget over all sequences
    threads: int  # of torch; 0 takes the cores this process may use but one, and at least one
    device: str
    dtype: str  # a torch dtype's name, or auto, see dtype.py
    engine: str = ""  # instead of the card's
    prefix_tokens: int = 0  # beginnings of sequences whose KV is kept beside it, for others that begin likewise
    pause_grace_s: float = 0.0  # what is kept so of a paused sequence does not give way to others for so long
    speculation: bool = False  # guess ahead where that pays, see speculation.py
    exact: bool = False  # a sequence's numbers shall not depend on who shares its batch, see lean.py


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Ask


class Abort(msgspec.Struct, frozen=True, tag=True):
    seq: str


class Pause(msgspec.Struct, frozen=True, tag=True):
    seq: str


class Resume(msgspec.Struct, frozen=True, tag=True):
    seq: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Exit after the step in hand."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    capabilities: Capabilities


class Begun(msgspec.Struct, frozen=True, tag=True):
    seqs: list[str]


class Outputs(msgspec.Struct, frozen=True, tag=True):
    outputs: list[Output]


class StatsReport(msgspec.Struct, frozen=True, tag=True):
    stats: Stats


Command = Submit | Abort | Pause | Resume | Stop
Report = Ready | Begun | Outputs | StatsReport

_LENGTH = Struct("!I")
_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_report_decoder = msgspec.msgpack.Decoder(Report)


def frame(message: Command | Report) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def checked_frame(command: Command) -> bytes:
    """A command's frame, read back once: what the child could not read is raised to who wrote it, here.

    Raises ValueError or TypeError, for a number or a text that msgpack cannot carry and for a wrong type.
    """
    try:
        data = frame(command)
    except OverflowError as error:
        raise ValueError(str(error)) from None
    _command_decoder.decode(memoryview(data)[_LENGTH.size :])
    return data


class Frames:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        frames: list[bytes] = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return frames


def commands(frames: list[bytes]) -> list[Command]:
    return [_command_decoder.decode(frame) for frame in frames]


def reports(frames: list[bytes]) -> list[Report]:
    return [_report_decoder.decode(frame) for frame in frames]


def usable_cores() -> int:
    """Cores this process may use: its CPU affinity, and the quota of its control group (v2) where one is set."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores
