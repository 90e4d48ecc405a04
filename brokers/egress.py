"""Requests to addresses that a tenant chose: never to one that only we can reach.

A name is resolved first, every address it has is checked, and a checked one is connected to, while TLS and the Host
header keep the name: what a resolver says a moment later changes nothing. No redirects, no proxies, no cookies, one
deadline for all of it, and of the answer nothing is read but its head.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpcore

from brokers.errors import LingbotError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_URL = re.compile(r"[\x21-\x7e]{1,2048}\Z")
_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?!.{{254}}){_LABEL}(?:\.{_LABEL})*\.?\Z")
_PORTS = {"https": 443, "http": 80}
_TROUBLES = (
    *(httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError),
    UnicodeError,  # of a resolver, for a name that it cannot even spell
)
_RESOLVERS = 16  # threads of their own: a resolver that hangs holds up nothing else

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NEVER = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.88.99.0/24",  # 6to4 relays
            "::/96",  # IPv4-compatible, long deprecated
            "64:ff9b:1::/48",  # NAT64 of a local operator
            "2001::/32",  # Teredo
            "fec0::/10",  # site-local, long deprecated
        ),
    )
)


class Refused(LingbotError):
    """This address is not called from here."""

    code = "address_refused"


class Failed(LingbotError):
    """The address could not be called."""

    code = "call_failed"


def check_url(url: str, *, allow_loopback: bool = False) -> None:
    """What can be told from the text alone. Raises Refused."""
    parts = _split(url, allow_loopback=allow_loopback)
    literal = _literal(parts.hostname or "")
    if literal:
        _check([literal], allow_loopback=allow_loopback)


def is_public(address: Address) -> bool:
    """Whether the address is one of the public internet, also when it is an IPv4 address in IPv6 clothes."""
    inner = _embedded(address)
    if inner is not None:
        return is_public(inner)
    refused = any(address.version == net.version and address in net for net in _NEVER)
    return address.is_global and not address.is_multicast and not address.is_reserved and not refused


class Egress:
    """Calls out. Raises Refused for an address that is not public, Failed for one that does not answer."""

    def __init__(self, *, timeout_s: float, allow_loopback: bool = False) -> None:
        self._timeout_s = timeout_s
        self._allow_loopback = allow_loopback
        self._backend = _Guarded(allow_loopback)

    async def post(self, url: str, headers: Sequence[tuple[str, str]], body: bytes) -> int:
        """The status of the answer."""
        parts = _split(url, allow_loopback=self._allow_loopback)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._post(parts, headers, body)
        except TimeoutError:
            raise Failed(f"no answer within {self._timeout_s:g} seconds") from None
        except _TROUBLES as error:
            raise Failed(f"{type(error).__name__}: {error}"[:200]) from error

    def close(self) -> None:
        self._backend.close()

    async def _post(self, parts: SplitResult, headers: Sequence[tuple[str, str]], body: bytes) -> int:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # Built from the parts that were checked: two parsers may differ in what they call the host.
        url = httpcore.URL(scheme=parts.scheme, host=parts.hostname or "", port=parts.port, target=target)
        host = parts.netloc.removesuffix(f":{_PORTS[parts.scheme]}")
        sent = [("Host", host), ("Content-Length", str(len(body))), *headers]
        async with (
            httpcore.AsyncConnectionPool(network_backend=self._backend) as pool,
            pool.stream("POST", url, headers=sent, content=body) as response,
        ):
            return int(response.status)


class _Guarded(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only."""

    def __init__(self, allow_loopback: bool) -> None:
        self._inner = httpcore.AnyIOBackend()
        self._allow_loopback = allow_loopback
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, "resolve")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        _check(addresses, allow_loopback=self._allow_loopback)
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return await self._inner.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore.NetworkError, httpcore.TimeoutException) as error:
                failure = error
        raise failure

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def close(self) -> None:
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    async def _resolve(self, host: str, port: int) -> list[Address]:
        found = await asyncio.get_running_loop().run_in_executor(self._resolvers, _lookup, host, port)
        return [ipaddress.ip_address(sockaddr[0].partition("%")[0]) for *_, sockaddr in found]


def _lookup(host: str, port: int) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _split(url: str, *, allow_loopback: bool) -> SplitResult:
    if not _URL.match(url):
        raise Refused("a URL is at most 2048 printable ASCII characters, without spaces")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Refused(str(error)) from None
    if parts.scheme not in ({"https", "http"} if allow_loopback else {"https"}):
        raise Refused("only https is called (http to this machine with the setting webhook_allow_loopback)")
    host = parts.hostname or ""
    if port == 0 or not (_NAME.match(host) or _literal(host)):
        raise Refused("there is no valid host in it")
    if "@" in parts.netloc or parts.fragment or "\\" in url:
        raise Refused("no user name, no fragment and no backslash may be in it")
    return parts


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _check(addresses: Iterable[Address], *, allow_loopback: bool) -> None:
    """All of them: a name with one private address is not to be trusted with the others."""
    for address in addresses:
        if not is_public(address) and not (allow_loopback and address.is_loopback):
            raise Refused(f"{address} is no address of the public internet")


def _embedded(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one stands for."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
