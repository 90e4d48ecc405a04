"""Calls to addresses that a tenant chose: what is never called."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from brokers import egress

_PRIVATE = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.1",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.0.1",
    "198.18.0.1",
    "224.0.0.1",
    "224.0.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:a00:1::",
    "fc00::1",
    "fd00::1",
    "fe80::1",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
]
_PUBLIC = ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::"]


@pytest.mark.parametrize("text", _PRIVATE)
def test_an_address_that_only_we_can_reach_is_not_public(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert not egress.is_public(address)
    host = f"[{text}]" if address.version == 6 else text
    with pytest.raises(egress.Refused):
        egress.check_url(f"https://{host}/hook")


@pytest.mark.parametrize("text", _PUBLIC)
def test_an_address_of_the_internet_is_public(text: str) -> None:
    assert egress.is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "ftp://example.com/",
        "file:///etc/passwd",
        "https:///nothing",
        "https://",
        "https://user@example.com/",
        "https://user:pw@example.com/",
        "https://example.com/#fragment",
        "https://example.com\\@10.0.0.1/",
        "https://exam ple.com/",
        "https://example.com/\r\nX: y",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://[::1/",
        "https://[fe80::1%25eth0]/",
        "https://-example.com/",
        "https://example..com/",
        "https://" + "x" * 64 + ".com/",
        "https://" + ".".join(["x" * 60] * 5) + "/",
        "https://example.com/" + "x" * 2048,
        "https://exämple.com/",
    ],
)
def test_a_url_that_would_never_be_called_is_refused_as_text(url: str) -> None:
    with pytest.raises(egress.Refused):
        egress.check_url(url)


@pytest.mark.parametrize("url", ["https://example.com", "https://hooks.example.com:8443/a?b=c", "https://1.1.1.1/"])
def test_a_url_that_may_be_called_is_taken(url: str) -> None:
    egress.check_url(url)


class Receiver:
    """A server on this machine that keeps what it is sent and answers what it is told to."""

    def __init__(self, answer: bytes = b"HTTP/1.1 204 No Content\r\n\r\n") -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answer)
        await writer.drain()
        writer.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    async with server:
        yield receiver


@pytest.fixture
async def caller() -> AsyncIterator[egress.Egress]:
    caller = egress.Egress(timeout_s=1.0, allow_loopback=True)
    yield caller
    caller.close()


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "017700000001", "localhost"])
async def test_a_name_for_a_private_address_is_found_out_when_it_is_resolved(receiver: Receiver, host: str) -> None:
    strict = egress.Egress(timeout_s=1.0)
    with pytest.raises(egress.Refused):
        await strict.post(f"https://{host}:{receiver.port}/", [], b"")
    strict.close()
    assert not receiver.heads


async def test_a_name_with_one_private_address_among_public_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, 1, 6, "", (address, port)) for address in ("1.1.1.1", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    strict = egress.Egress(timeout_s=1.0)
    with pytest.raises(egress.Refused, match=r"10\.0\.0\.1"):
        await strict.post("https://rebound.example/", [], b"")
    strict.close()


async def test_a_name_that_no_resolver_can_spell_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: "x..y".encode("idna"))
    strict = egress.Egress(timeout_s=1.0)
    with pytest.raises(egress.Failed, match="UnicodeError"):
        await strict.post("https://example.com/", [], b"")
    strict.close()


async def test_the_checked_address_is_connected_to_and_the_name_is_in_the_host_header(
    receiver: Receiver, caller: egress.Egress, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def once(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        asked.append(host)
        return resolve("127.0.0.1" if host == "hooks.example" else host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", once)
    status = await caller.post(f"http://hooks.example:{receiver.port}/a?b=c", [("X-One", "1")], b"{}")
    assert status == 204
    assert asked.count("hooks.example") == 1
    (head,) = receiver.heads
    assert head.startswith(b"POST /a?b=c HTTP/1.1\r\n")
    assert f"Host: hooks.example:{receiver.port}\r\n".encode() in head
    assert b"X-One: 1\r\n" in head


async def test_a_server_whose_certificate_is_not_the_names_gets_nothing_but_the_name(
    tmp_path: Path, caller: egress.Egress, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())
        writer.close()

    context = _self_signed(tmp_path)
    context.sni_callback = lambda _socket, name, _context: asked.append(name)
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _host, port, *a, **k: resolve("127.0.0.1", port, *a, **k))
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        with pytest.raises(egress.Failed, match="certificate"):
            await caller.post(f"https://hooks.example:{server.sockets[0].getsockname()[1]}/", [], b"{}")
    assert asked == ["hooks.example"]
    assert not heard


def _self_signed(folder: Path) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hooks.example")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    dated = builder.not_valid_before(now).not_valid_after(now + timedelta(days=1))
    signed = dated.sign(key, SHA256())
    path = folder / "server.pem"
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(secret + signed.public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


async def test_a_redirect_is_an_answer_and_is_not_followed(receiver: Receiver, caller: egress.Egress) -> None:
    receiver.answer = f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{receiver.port}/b\r\n\r\n".encode()
    assert await caller.post(f"http://127.0.0.1:{receiver.port}/", [], b"") == 302
    assert len(receiver.heads) == 1


async def test_an_answer_without_end_is_not_read(receiver: Receiver, caller: egress.Egress) -> None:
    receiver.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 4096
    assert await caller.post(f"http://127.0.0.1:{receiver.port}/", [], b"") == 200


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1_000_000])
async def test_an_answer_that_is_none_is_a_failure(receiver: Receiver, caller: egress.Egress, answer: bytes) -> None:
    receiver.answer = answer
    with pytest.raises(egress.Failed):
        await caller.post(f"http://127.0.0.1:{receiver.port}/", [], b"")


async def test_a_receiver_that_says_nothing_is_given_up_in_time(caller: egress.Egress) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        started = asyncio.get_running_loop().time()
        with pytest.raises(egress.Failed, match="within 1 seconds"):
            await caller.post(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", [], b"")
        assert asyncio.get_running_loop().time() - started < 1.5
