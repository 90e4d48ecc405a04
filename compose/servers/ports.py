"""Ports of 127.0.0.1: free ones, and the same ones again after a restart."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterable
from pathlib import Path

# Below Linux's ephemeral range (32768 up): an outgoing connection of any program could otherwise take the port of a
# server while it restarts.
_RANGE = range(20_000, 32_000)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def reserve(port: int) -> socket.socket | None:
    """Keep other platforms off a port between choosing it and listening on it; None when one of them has it.

    An abstract Unix socket is a lock that the kernel drops with its process, and it is per network namespace, as
    ports are."""
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0lingbot-port-{port}")
    except OSError:
        held.close()
        return None
    return held


class PortBook:
    """Who listens where, remembered in a JSON file when one is given. It holds its ports as long as it lives."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._ports: dict[str, int] = _read(path) if path else {}
        self._given: dict[int, socket.socket] = {}

    def take(self, name: str, preferred: int | None = None) -> int:
        """The port of `name`: the one it had if that is free, else the preferred one or the next free one above it,
        else any free one. The same name gets the same port again, whoever listens there now."""
        if name in self._ports and self._ports[name] in self._given:
            return self._ports[name]
        for port in self._candidates(name, preferred):
            if is_free(port) and (held := reserve(port)):
                self._given[port] = held
                self._ports[name] = port
                return port
        raise RuntimeError("no port of 127.0.0.1 is free")

    def known(self, name: str) -> int | None:
        """The port last given to `name`, here or in an earlier run."""
        return self._ports.get(name)

    def forget_others(self) -> None:
        """Drop the names nobody took since the start."""
        self._ports = {name: port for name, port in self._ports.items() if port in self._given}

    def save(self) -> None:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._ports, indent=2) + "\n")

    def close(self) -> None:
        """Let others have the ports."""
        for held in self._given.values():
            held.close()
        self._given.clear()

    def _candidates(self, name: str, preferred: int | None) -> Iterable[int]:
        if name in self._ports:
            yield self._ports[name]
        if preferred is not None:
            yield from range(preferred, preferred + 100)
        yield from random.sample(_RANGE, len(_RANGE))


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}  # a lost or damaged book costs new ports, nothing else
    return {str(name): port for name, port in found.items() if isinstance(port, int)}
