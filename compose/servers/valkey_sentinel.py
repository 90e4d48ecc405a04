"""A private Valkey with replicas, watched by Sentinels that replace it when it dies."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import redis

from compose.servers import secret
from compose.servers.group import Group
from compose.servers.ports import PortBook
from compose.servers.process import Process
from compose.servers.server import Server
from compose.servers.valkey import Valkey, find_binary

SERVICE = "lingbot"

_CONFIG = """\
bind 127.0.0.1
port {port}
dir {folder}
requirepass {own_password}
sentinel sentinel-pass {own_password}
sentinel monitor {service} 127.0.0.1 {primary_port} {quorum}
sentinel auth-pass {service} {password}
sentinel down-after-milliseconds {service} 1000
sentinel failover-timeout {service} 5000
"""


class Sentinel(Server):
    """One Sentinel. It keeps what it knows in its configuration file, so that is written once."""

    def __init__(self, folder: Path, port: int, config: str, password: str) -> None:
        self.folder = secret.private_folder(folder)
        self.port = port
        self._password = password
        path = self.folder / "sentinel.conf"
        if not path.exists():
            secret.write_private(path, config)
        self.process = Process(
            "Sentinel",
            [find_binary(), str(path), "--sentinel"],
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            log=self.folder / "log",
            pid_file=self.folder / "pid",
        )

    def ready(self) -> bool:
        try:
            return bool(self._probe.ping())
        except redis.RedisError:
            return False

    def sees(self, replicas: int, sentinels: int) -> bool:
        """Whether it watches the primary, all its replicas, and knows the other Sentinels."""
        state = self.state()
        return bool(state["num-slaves"] == replicas and state["num-other-sentinels"] == sentinels - 1)

    def state(self) -> dict[str, Any]:
        """What it says of the primary."""
        state: dict[str, Any] = self._probe.sentinel_master(SERVICE)  # type: ignore[assignment]
        return state

    @cached_property
    def _probe(self) -> redis.Redis:
        url = f"redis://:{self._password}@127.0.0.1:{self.port}"
        return redis.Redis.from_url(url, socket_timeout=0.5, socket_connect_timeout=0.5, retry=None)


class ValkeySentinel(Group):
    """A primary, its replicas and an odd number of Sentinels; roles change with failovers."""

    def __init__(self, folder: Path, *, replicas: int = 1, sentinels: int = 3, ports: PortBook | None = None) -> None:
        ports = ports or PortBook()
        self.password = secret.kept(secret.private_folder(folder) / "password")
        self.sentinel_password = secret.kept(folder / "sentinel_password")
        self.servers = [self._server(folder / f"server{n}", n, ports) for n in range(replicas + 1)]
        self.sentinels = [self._sentinel(folder / f"sentinel{n}", n, sentinels, ports) for n in range(sentinels)]

    @property
    def members(self) -> list[Server]:
        return [*self.servers, *self.sentinels]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://:{self.password}@{hosts}/{SERVICE}/0?sentinel_password={self.sentinel_password}"

    @property
    def primary(self) -> Valkey:
        """The server that the Sentinels name now."""
        port = self.sentinels[0].state()["port"]
        return next(server for server in self.servers if server.port == port)

    def form(self) -> None:
        self.wait_until(
            "the Sentinels see everybody",
            lambda: all(s.sees(len(self.servers) - 1, len(self.sentinels)) for s in self.sentinels),
        )
        self.wait_until("the replicas have the data", self._in_sync)

    def _in_sync(self) -> bool:
        replication = self.primary._probe.info("replication")
        return int(replication["connected_slaves"]) == len(self.servers) - 1

    def _server(self, folder: Path, n: int, ports: PortBook) -> Valkey:
        secret.write_private(folder / "password", self.password)
        extra = [f"masterauth {self.password}", "repl-diskless-sync-delay 0"]
        if n:
            extra.append(f"replicaof 127.0.0.1 {ports.take('valkey-server0')}")
        return Valkey(folder, ports=ports, port_name=f"valkey-server{n}", extra=extra)

    def _sentinel(self, folder: Path, n: int, sentinels: int, ports: PortBook) -> Sentinel:
        port = ports.take(f"sentinel{n}")
        config = _CONFIG.format(
            port=port,
            folder=folder,
            own_password=self.sentinel_password,
            service=SERVICE,
            primary_port=self.servers[0].port,
            quorum=sentinels // 2 + 1,
            password=self.password,
        )
        return Sentinel(folder, port, config, self.sentinel_password)
