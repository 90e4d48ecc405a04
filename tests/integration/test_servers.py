"""The private servers: they start beside anything, keep data over a kill, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pika
import psutil
import pytest
import redis

from brokers.settings import Settings
from compose.servers import PortBook, RabbitMQ, Valkey
from compose.servers.errors import StartFailed
from compose.servers.process import running
from compose.supervisor.folder import StateFolder
from compose.supervisor.platform import Platform
from workers.weights.scripted import create_scripted_model

_SUPERVISOR = """
import sys, time
from pathlib import Path
from compose.servers import RabbitMQ, Valkey
folder = Path(sys.argv[1])
valkey = Valkey(folder / "valkey")
rabbitmq = RabbitMQ(folder / "rabbitmq")
valkey.start(); rabbitmq.start()
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    with Valkey(tmp_path / "valkey") as server:
        yield server


def _client(server: Valkey) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def test_valkey_asks_for_its_password(own_valkey: Valkey) -> None:
    stranger = redis.Redis(port=own_valkey.port)
    with pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_valkey_never_evicts_and_appends_to_a_file(own_valkey: Valkey) -> None:
    with _client(own_valkey) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("append*")["appendonly"] == "yes"


def test_valkey_keeps_what_it_was_given_over_a_kill(own_valkey: Valkey) -> None:
    with _client(own_valkey) as client:
        client.set("kept", "yes")
        client.execute_command("WAITAOF", 1, 0, 2000)
    port = own_valkey.port
    own_valkey.kill()
    own_valkey.start()
    with _client(own_valkey) as client:
        assert client.get("kept") == "yes"
    assert own_valkey.port == port


def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = Valkey(tmp_path / "valkey", extra=["no-such-directive 1"])
    with pytest.raises(StartFailed, match="no-such-directive"):
        server.start()


def test_rabbitmq_keeps_a_persistent_message_over_a_kill(rabbitmq: RabbitMQ) -> None:
    arguments = {"x-queue-type": "quorum"}
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url("local"))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("kept", durable=True, arguments=arguments)
        time.sleep(1)  # 3.10 writes a queue's registration some time after it is declared; a kill before is fatal to it
        channel.basic_publish("", "kept", b"yes", pika.BasicProperties(delivery_mode=2))
    rabbitmq.kill()
    rabbitmq.start()
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url("local"))) as connection:
        assert _get(connection.channel(), "kept") == b"yes"
        connection.channel().queue_delete("kept")


def test_rabbitmq_lets_no_guest_in(rabbitmq: RabbitMQ) -> None:
    guest = httpx.get(f"http://127.0.0.1:{rabbitmq.management_port}/api/overview", auth=("guest", "guest"))
    assert guest.status_code == 401


def test_everything_listens_on_this_machine_alone(rabbitmq: RabbitMQ, valkey: Valkey) -> None:
    pids = {rabbitmq.process.pid, rabbitmq.epmd_pid, valkey.process.pid}
    addresses = {
        connection.laddr.ip
        for pid in pids
        for connection in psutil.Process(pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses <= {"127.0.0.1", "::1"}


def test_a_healthy_worker_may_hold_a_message_for_as_long_as_a_job_lives(rabbitmq: RabbitMQ) -> None:
    """As the broker itself tells it, in ms: unset it is half an hour, and `undefined` is not a value on 4.3."""
    told = rabbitmq.ctl("eval", "application:get_env(rabbit, consumer_timeout).").strip()
    assert re.fullmatch(r"\{ok,\d+\}", told)
    assert int(told[4:-1]) > Settings(region="local").max_expires_s * 1000


def test_longer_deadlines_make_the_broker_more_patient(
    rabbitmq: RabbitMQ, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ before 3.12 takes no timeout from the queue."""
    monkeypatch.setenv("LINGBOT_MAX_EXPIRES_S", str(30 * 3600))
    create_scripted_model(tmp_path / "models", "scripted")
    platform = Platform(StateFolder(tmp_path))
    assert platform.rabbitmq.consumer_timeout_s > 30 * 3600


def test_secrets_are_readable_by_their_owner_alone(rabbitmq: RabbitMQ, valkey: Valkey) -> None:
    for folder in (rabbitmq.folder, valkey.folder):
        assert folder.stat().st_mode & 0o077 == 0
    for path in (rabbitmq.folder / "rabbitmq.conf", rabbitmq.folder / "password", valkey.folder / "valkey.conf"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_killed_supervisor_leaves_no_server_behind(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert supervisor.stdout
    assert supervisor.stdout.readline() == "up\n"
    pid_files = [tmp_path / "valkey" / "pid", tmp_path / "rabbitmq" / "pid", tmp_path / "rabbitmq" / "epmd.pid"]
    assert all(running(path) for path in pid_files)
    family = psutil.Process(supervisor.pid).children(recursive=True)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    _, left = psutil.wait_procs(family, timeout=10)
    assert left == []


def test_a_leftover_is_ended_at_the_next_start(tmp_path: Path) -> None:
    first = Valkey(tmp_path / "valkey", ports=PortBook(tmp_path / "ports.json"))
    first.start()
    second = Valkey(tmp_path / "valkey")
    with second:
        assert second.port != first.port
        assert _gone(first)
    first.kill()


def _gone(server: Valkey) -> bool:
    deadline = time.monotonic() + 5
    while server.process.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    return not server.process.alive


def _get(channel: pika.adapters.blocking_connection.BlockingChannel, queue: str) -> bytes | None:
    deadline = time.monotonic() + 10  # a quorum queue elects its leader after a restart
    while time.monotonic() < deadline:
        _, _, body = channel.basic_get(queue, auto_ack=True)
        if body is not None:
            return bytes(body)
        time.sleep(0.05)
    return None
