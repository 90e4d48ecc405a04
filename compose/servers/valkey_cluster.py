"""A private Valkey Cluster: primaries that share the slots, each with as many replicas as wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis

from compose.servers import secret
from compose.servers.group import Group
from compose.servers.ports import PortBook
from compose.servers.valkey import Valkey

_SLOTS = 16384
_NODE_TIMEOUT_MS = 1500  # a primary that is silent this long is replaced by its replica


class ValkeyCluster(Group):
    """Ready when all of it agrees on who serves what. `primaries` are those of the start; failovers change roles."""

    def __init__(self, folder: Path, *, primaries: int = 3, replicas: int = 0, ports: PortBook | None = None) -> None:
        ports = ports or PortBook()
        self.password = secret.kept(secret.private_folder(folder) / "password")
        names = [f"primary{n}" for n in range(primaries)]
        names += [f"replica{n}of{m}" for m in range(primaries) for n in range(replicas)]
        self._bus = {name: ports.take(f"valkey-{name}-bus") for name in names}
        self.nodes = {name: self._node(folder / name, name, ports) for name in names}
        self.primaries = [self.nodes[f"primary{n}"] for n in range(primaries)]

    @property
    def members(self) -> list[Valkey]:
        return list(self.nodes.values())

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.primaries)
        return f"redis+cluster://:{self.password}@{hosts}"

    def serving(self, slot: int) -> Valkey:
        """The server that holds a slot now, by what any server that answers says."""
        for node in self.members:
            try:
                for first, last, primary, *_ in _ask(node, "CLUSTER", "SLOTS"):
                    if first <= slot <= last:
                        return next(node for node in self.members if node.port == primary[1])
            except redis.RedisError:
                continue
        raise LookupError(f"no server says who holds slot {slot}")

    def form(self) -> None:
        if _ask(self.primaries[0], "CLUSTER", "SLOTS"):  # started again on the data of before
            self.wait_until("the Cluster is whole", self._whole)
            return
        for epoch, node in enumerate(self.members, start=1):
            _ask(node, "CLUSTER", "SET-CONFIG-EPOCH", epoch)
        share = -(-_SLOTS // len(self.primaries))
        for n, node in enumerate(self.primaries):
            _ask(node, "CLUSTER", "ADDSLOTSRANGE", n * share, min((n + 1) * share, _SLOTS) - 1)
        for name, node in self.nodes.items():
            _ask(self.primaries[0], "CLUSTER", "MEET", "127.0.0.1", node.port, self._bus[name])
        self.wait_until("all know each other", lambda: all(self._knows_all(node) for node in self.members))
        for name, node in self.nodes.items():
            if "of" in name:
                primary = self.nodes["primary" + name.partition("of")[2]]
                _ask(node, "CLUSTER", "REPLICATE", _ask(primary, "CLUSTER", "MYID"))
        self.wait_until("the Cluster is whole", self._whole)

    def _whole(self) -> bool:
        """Everybody sees who serves all slots and who stands by, and every replica has its primary's data."""
        return all(self._healthy(node) for node in self.members)

    def _healthy(self, node: Valkey) -> bool:
        shares = _ask(node, "CLUSTER", "SLOTS")
        served = sum(last - first + 1 for first, last, *_ in shares)
        seen = {server[1] for _, _, *servers in shares for server in servers}
        replication = node._probe.info("replication")
        in_sync = replication["role"] == "master" or replication.get("master_link_status") == "up"
        state = node._probe.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
        return served == _SLOTS and len(seen) == len(self.nodes) and in_sync and state["cluster_state"] == "ok"

    def _knows_all(self, node: Valkey) -> bool:
        lines = _ask(node, "CLUSTER", "NODES").decode().splitlines()
        return len(lines) == len(self.members) and not any("handshake" in line for line in lines)

    def _node(self, folder: Path, name: str, ports: PortBook) -> Valkey:
        secret.write_private(folder / "password", self.password)
        extra = [
            "cluster-enabled yes",
            "cluster-config-file nodes.conf",
            f"cluster-port {self._bus[name]}",
            f"cluster-node-timeout {_NODE_TIMEOUT_MS}",
            "cluster-require-full-coverage no",  # what one primary holds is away with it, and no more
            f"masterauth {self.password}",
        ]
        return Valkey(folder, ports=ports, port_name=f"valkey-{name}", extra=extra)


def _ask(node: Valkey, *command: Any) -> Any:
    return node._probe.execute_command(*command)  # type: ignore[no-untyped-call]
