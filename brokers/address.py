"""Where a region's Redis is: one server, a Sentinel group, or a Cluster, told by one URL.

    redis://user:password@host:6379/0
    redis+sentinel://user:password@host1:26379,host2:26379/service/0
    redis+cluster://user:password@host1:6379,host2:6379

`rediss` in place of `redis` is TLS. User and password are the data servers'; those of the Sentinels themselves, if they
ask for any, are in the query: `?sentinel_username=…&sentinel_password=…`. Other options of redis-py go there too.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

from brokers.errors import ConfigurationError


class Layout(StrEnum):
    """How the servers behind an address share the work."""

    ONE = ""
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_PORTS = {Layout.ONE: 6379, Layout.SENTINEL: 26379, Layout.CLUSTER: 6379}
_FORMS = "redis://host:port/0, redis+sentinel://host:port,host:port/service/0 or redis+cluster://host:port,host:port"


class Node(NamedTuple):
    """One server; an IPv6 host stands without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Address(NamedTuple):
    """What a URL says. It holds a password: it is not for logs."""

    layout: Layout
    url: str  # as given, for a single server
    nodes: tuple[Node, ...]  # the servers to ask first
    tls: bool = False
    login: str = ""  # user:password@, quoted as in the URL
    service: str = ""  # Sentinel's name for the group
    db: int = 0
    query: str = ""
    sentinel_login: tuple[str, str] = ("", "")

    def at(self, node: Node) -> str:
        """The URL of one data server."""
        scheme = "rediss" if self.tls else "redis"
        return f"{scheme}://{self.login}{node}/{self.db}" + (f"?{self.query}" if self.query else "")


def parse(url: str) -> Address:
    """Raises ConfigurationError, which does not show the URL."""
    parts = urlsplit(url)
    base, _, word = parts.scheme.partition("+")
    if word == "" and base in ("redis", "rediss", "unix"):
        return Address(Layout.ONE, url, ())
    if base not in ("redis", "rediss") or word not in (Layout.SENTINEL, Layout.CLUSTER):
        raise ConfigurationError("the address of a Redis is of no known form", hint=f"It is {_FORMS}.")
    layout = Layout(word)
    login, at, hosts = parts.netloc.rpartition("@")
    service, db = _path(layout, parts.path)
    options = dict(parse_qsl(parts.query))
    sentinel_login = options.pop("sentinel_username", ""), options.pop("sentinel_password", "")
    nodes = tuple(_node(part, _PORTS[layout]) for part in hosts.split(","))
    return Address(layout, url, nodes, base == "rediss", login + at, service, db, urlencode(options), sentinel_login)


def _path(layout: Layout, path: str) -> tuple[str, int]:
    """Service and database. A Cluster has neither."""
    words = path.strip("/").split("/") if path.strip("/") else []
    db = words.pop() if words and words[-1].isdecimal() and (layout is Layout.CLUSTER or len(words) > 1) else "0"
    if layout is Layout.CLUSTER and (words or int(db)):
        raise ConfigurationError("a Redis Cluster has database 0 alone", hint=f"The address is {_FORMS}.")
    if layout is Layout.SENTINEL and len(words) != 1:
        raise ConfigurationError("a Sentinel's address names one service", hint=f"The address is {_FORMS}.")
    return (words[0] if words else ""), int(db)


def _node(text: str, default_port: int) -> Node:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal():
        raise ConfigurationError("the address of a Redis names a host or port badly", hint=f"It is {_FORMS}.")
    return Node(host, int(port))
