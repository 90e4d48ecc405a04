"""A private RabbitMQ with its management plugin under a folder of ours, beside whatever else runs on the machine.

The system's start script changes to a user and to folders of its own, so the one in RabbitMQ's bin folder is run
directly, with every path, port and name in its environment. Layout of the folder:

    rabbitmq.conf (0600)      listeners, limits, where the definitions are
    definitions.json (0600)   our user, one vhost a region; loaded at every start
    password (0600)           of our user; there is no guest
    home/.erlang.cookie       of this node alone
    data/, log, pid, epmd.pid

epmd, Erlang's name server, normally detaches and outlives every node. Here it is started first, as a child in the
foreground, and stopped last; the node finds it running and starts none.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pika
from pika.exceptions import AMQPError

from compose.servers import secret
from compose.servers.errors import ServerMissing, StartFailed
from compose.servers.ports import PortBook
from compose.servers.process import Process
from compose.servers.server import Server

USER = "lingbot"
_NODE = "lingbot@127.0.0.1"  # by address: not every small machine knows the name localhost
_BIN = Path("/usr/lib/rabbitmq/bin")  # Debian, Ubuntu, Fedora

_CONFIG = """\
listeners.tcp.1 = 127.0.0.1:{amqp}
management.tcp.ip = 127.0.0.1
management.tcp.port = {management}
load_definitions = {definitions}
# An unacknowledged message is a job that runs, for hours maybe; the broker's own limit, 30 min, would close the
# channel of a healthy worker.
consumer_timeout = {consumer_timeout_ms}
# The default, 50 MB, stops nobody in time; more would refuse to work on a laptop.
disk_free_limit.absolute = 256MB
# The log of the quorum queues lives in memory up to this size; the default, 512 MB, is for servers.
raft.wal_max_size_bytes = 67108864
log.console = true
log.console.level = info
log.file = false
"""


class RabbitMQ(Server):
    """One RabbitMQ node, one vhost per region; ready when an AMQP login works."""

    stop_grace_s = 30.0

    def __init__(
        self,
        folder: Path,
        *,
        regions: Sequence[str] = ("local",),
        ports: PortBook | None = None,
        log: Path | None = None,
        consumer_timeout_s: float = 8 * 3600,
    ) -> None:
        self.folder = secret.private_folder(folder)
        self.regions = tuple(regions)
        book = ports or PortBook()
        self.port = book.take("amqp")
        self.management_port = book.take("management")
        self._distribution_port = book.take("distribution")
        self._epmd_port = book.take("epmd")
        self.consumer_timeout_s = consumer_timeout_s  # takes effect at the next launch
        self.password = secret.kept(self.folder / "password")
        log = log or self.folder / "log"
        environment = self._environment()
        self.process = Process(
            "RabbitMQ", [str(find_script())], env=environment, log=log, pid_file=self.folder / "pid", cwd=self.folder
        )
        self._epmd = Process(
            "epmd",
            [find_epmd(), "-address", "127.0.0.1", "-port", str(self._epmd_port)],
            env=environment,
            log=log,
            pid_file=self.folder / "epmd.pid",
        )

    def url(self, region: str) -> str:
        """AMQP address of a region's vhost."""
        return f"amqp://{USER}:{self.password}@127.0.0.1:{self.port}/{vhost(region)}"

    @property
    def management_url(self) -> str:
        return f"http://{USER}:{self.password}@127.0.0.1:{self.management_port}"

    @property
    def epmd_pid(self) -> int:
        return self._epmd.pid

    def launch(self) -> None:
        self._write_files()
        if not self._epmd.alive:
            self._epmd.spawn()
            self._await_epmd()
        super().launch()

    def ready(self) -> bool:
        return _listens(self.port) and can_log_in(self.url(self.regions[0]))

    def stop(self) -> None:
        super().stop()
        self._epmd.kill()  # it has no state, and asks back when told to end while a node is registered

    def kill(self) -> None:
        super().kill()
        self._epmd.kill()

    def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl against this node; its output. Raises CalledProcessError."""
        command = [str(find_script().with_name("rabbitmqctl")), "--node", _NODE, *arguments]
        done = subprocess.run(command, env=self._environment(), check=True, capture_output=True, text=True, timeout=60)
        return done.stdout

    def _await_epmd(self) -> None:
        deadline = time.monotonic() + 10
        while not _listens(self._epmd_port):
            if not self._epmd.alive or time.monotonic() > deadline:
                raise StartFailed(f"epmd did not start:\n{self._epmd.tail()}")
            time.sleep(0.02)

    def _environment(self) -> dict[str, str]:
        at = self.folder
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "HOME": str(at / "home"),  # where the cookie is
            # Makes the script exec the Erlang machine instead of minding it: our child is then the node itself.
            "RUNNING_UNDER_SYSTEMD": "true",
            "RABBITMQ_NODENAME": _NODE,
            "RABBITMQ_USE_LONGNAME": "true",
            "RABBITMQ_MNESIA_BASE": str(at / "data"),
            "RABBITMQ_LOG_BASE": str(at),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(at / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(at / "enabled_plugins"),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd_port),
            # The next three would otherwise be read from /etc/rabbitmq, which belongs to the system's node.
            "RABBITMQ_CONF_ENV_FILE": str(at / "rabbitmq-env.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(at / "advanced.config"),
            "RABBITMQ_CONFIG_FILES": str(at / "conf.d"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }

    def _write_files(self) -> None:
        definitions = self.folder / "definitions.json"
        config = _CONFIG.format(
            amqp=self.port,
            management=self.management_port,
            definitions=definitions,
            consumer_timeout_ms=int(self.consumer_timeout_s * 1000),
        )
        secret.kept(self.folder / "home" / ".erlang.cookie", lambda: secrets.token_hex(20))
        secret.write_private(self.folder / "rabbitmq.conf", config)
        secret.write_private(definitions, json.dumps(self._definitions(), indent=2))
        (self.folder / "enabled_plugins").write_text("[rabbitmq_management].\n")

    def _definitions(self) -> dict[str, object]:
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        return {
            "users": [{"name": USER, "password_hash": _password_hash(self.password), "tags": "administrator"}],
            "vhosts": [{"name": vhost(region)} for region in self.regions],
            "permissions": [{"user": USER, "vhost": vhost(region), **everything} for region in self.regions],
        }


def vhost(region: str) -> str:
    return f"lingbot-{region}"


def find_script() -> Path:
    """RabbitMQ's own start script. Raises ServerMissing."""
    on_path = shutil.which("rabbitmq-server")
    beside = Path(on_path).resolve() if on_path else None
    # A script beside rabbitmq-env is RabbitMQ's own; one without is a wrapper of the system's.
    for script in (_BIN / "rabbitmq-server", beside):
        if script and script.is_file() and script.with_name("rabbitmq-env").is_file():
            return script
    raise ServerMissing(
        "RabbitMQ is not installed",
        hint="Install the package rabbitmq-server; its system service is not needed and may stay off.",
    )


def find_epmd() -> str:
    """Erlang's name server. Raises ServerMissing."""
    found = shutil.which("epmd")
    if found is None:
        raise ServerMissing("epmd is not installed", hint="It comes with Erlang: install the package rabbitmq-server.")
    return found


def _password_hash(password: str) -> str:
    # https://www.rabbitmq.com/docs/passwords: four bytes of salt, then SHA-256 of salt and password
    salt = secrets.token_bytes(4)
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def can_log_in(url: str) -> bool:
    """Whether an AMQP login works, within about two seconds."""
    parameters = pika.URLParameters(url)
    parameters.socket_timeout = parameters.blocked_connection_timeout = 1.0
    parameters.stack_timeout = 2.0
    with _quiet_pika():
        try:
            pika.BlockingConnection(parameters).close()
        except (AMQPError, OSError):
            return False
    return True


@contextlib.contextmanager
def _quiet_pika() -> Iterator[None]:
    """A login that fails is no error while a broker starts; pika logs each with a traceback."""
    logger = logging.getLogger("pika")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
