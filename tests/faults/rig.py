"""A platform to be broken: private servers, several workers and APIs, each a process that can be killed by its name.

Servers are shared by all fault tests of a run; a rig is the processes of one group of tests, with settings of its
own. With `proxied` its processes reach RabbitMQ and Redis through fault proxies.
"""

from __future__ import annotations

import base64
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from types import TracebackType
from typing import NamedTuple, Self

import httpx

from brokers import topology
from brokers.settings import Settings
from compose import commands, config, keys, probes
from compose.servers import PortBook, Process, RabbitMQ, Valkey
from tests.faults import proxy
from tests.faults.checker import Checker
from tests.faults.load import Load, Work, each_once
from tests.faults.proxy import FaultProxy
from tests.platform import SCRIPTED_MODEL
from workers.weights.scripted import create_scripted_model

REGION = "local"
_READY_S = 60.0


class Servers(NamedTuple):
    """What every rig shares."""

    folder: Path
    rabbitmq: RabbitMQ
    valkey: Valkey
    ports: PortBook
    models_dir: Path
    seal_key: str


@contextmanager
def servers(folder: Path, real_models: Path) -> Iterator[Servers]:
    """Started, with an origin that holds the scripted model and links to the real ones."""
    ports = PortBook()
    models_dir = folder / "models"
    create_scripted_model(models_dir, SCRIPTED_MODEL, {"directives": True})
    for model in real_models.glob("*/"):
        (models_dir / model.name).symlink_to(model)
    with ExitStack() as stack:
        rabbitmq = stack.enter_context(RabbitMQ(folder / "rabbitmq", regions=[REGION], ports=ports))
        valkey = stack.enter_context(Valkey(folder / "valkey", ports=ports))
        yield Servers(folder, rabbitmq, valkey, ports, models_dir, base64.b64encode(secrets.token_bytes(32)).decode())


class Rig:
    """Workers `w1`, `w2` ..., APIs `api1` ... and `reconciler`."""

    def __init__(
        self,
        servers: Servers,
        name: str,
        *,
        model: str = SCRIPTED_MODEL,
        workers: int = 2,
        apis: int = 1,
        proxied: bool = False,
        env: dict[str, str] | None = None,
        **settings: object,
    ) -> None:
        self.servers = servers
        self.model = model
        self.folder = servers.folder / name
        self.to_rabbitmq = proxy.to(servers.rabbitmq.url(REGION))
        self.to_valkey = proxy.to(servers.valkey.url)
        self._proxied = proxied
        self._wanted = settings
        self._env = env or {}
        self._names = [f"w{n + 1}" for n in range(workers)], [f"api{n + 1}" for n in range(apis)]
        self._api_ports = {api: servers.ports.take(f"{name}-{api}") for api in self._names[1]}
        self.processes: dict[str, Process] = {}
        self._log_starts: dict[str, int] = {}  # of the process that runs now

    # --- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Ours reach the servers directly: a test looks at the truth, whatever stands between them and the processes.
        self.settings = self._configure("direct.toml", proxied=False)
        if self._proxied:
            self.to_rabbitmq.start()
            self.to_valkey.start()
        self._configure("lingbot.toml", proxied=self._proxied)
        topology.declare(self.settings, [self.model])
        workers, apis = self._names
        argv = {name: commands.worker(self.settings, [self.model], name=name) for name in workers}
        argv |= {name: commands.api() for name in apis} | {"reconciler": commands.reconciler()}
        self.processes = {name: self._process(name, line) for name, line in argv.items()}
        for name in self.processes:
            self.launch(name)
        for name in self.processes:
            self.wait_ready(name)

    def stop(self) -> None:
        for process in self.processes.values():
            process.ask_to_stop()
        for process in self.processes.values():
            process.stop(grace_s=5)
        if self._proxied:
            self.to_rabbitmq.stop()
            self.to_valkey.stop()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _configure(self, file: str, *, proxied: bool) -> Settings:
        amqp, store = self.servers.rabbitmq.url(REGION), self.servers.valkey.url
        if proxied:
            amqp, store = self.to_rabbitmq.url(amqp), self.to_valkey.url(store)
        region = {"amqp": amqp, "redis": store, "management": self.servers.rabbitmq.management_url}
        wanted = {
            "region": REGION,
            "regions": {REGION: region},
            "models_dir": self.servers.models_dir,
            "runtime_dir": self.folder / "run",
            "seal_keys": {"faults": self.servers.seal_key},
            **self._wanted,
        }
        path = self.folder / file
        path.write_text(config.to_toml(wanted))
        return config.read(path)

    def _process(self, name: str, argv: list[str]) -> Process:
        own = {"port": self._api_ports[name]} if name in self._api_ports else {}
        return Process(
            name,
            argv,
            env=commands.environment(self.folder / "lingbot.toml", **own) | self._env,
            log=self.folder / "logs" / f"{name}.log",
            pid_file=self.folder / "run" / f"{name}.pid",
        )

    # --- processes --------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[str]:
        return self._names[0]

    @property
    def apis(self) -> list[str]:
        return self._names[1]

    @property
    def base_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._api_ports.values()]

    def kill(self, name: str) -> float:
        """End it with -9; when that was (monotonic)."""
        now = time.monotonic()
        self.processes[name].kill()
        return now

    def launch(self, name: str) -> None:
        self._log_starts[name] = len(self.log(name))
        self.processes[name].spawn()

    def spawn(self, name: str) -> None:
        """Start it and wait until it is ready."""
        self.launch(name)
        self.wait_ready(name)

    def freeze(self, name: str) -> None:
        os.killpg(self.processes[name].pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        os.killpg(self.processes[name].pid, signal.SIGCONT)

    def log(self, name: str) -> str:
        log = self.processes[name].log
        return log.read_text(errors="replace") if log.exists() else ""

    def wait_ready(self, name: str) -> None:
        process, ready = self.processes[name], self._probe(name)
        deadline = time.monotonic() + _READY_S
        while not ready():
            if not process.alive or time.monotonic() > deadline:
                raise AssertionError(f"{name} is not ready (exit code {process.exit_code}):\n{process.tail(40)}")
            time.sleep(0.05)

    def _probe(self, name: str) -> Callable[[], bool]:
        if name in self._api_ports:
            return lambda: probes.api_ready(f"http://127.0.0.1:{self._api_ports[name]}")
        if name == "reconciler":
            return lambda: probes.has_leader(self.settings)
        return lambda: "ready." in self.log(name)[self._log_starts.get(name, 0) :]

    # --- jobs -------------------------------------------------------------------------------------------------

    def tenant(self) -> tuple[str, str]:
        """A tenant of its own, and its API key."""
        tenant = "t" + secrets.token_hex(6)
        return tenant, keys.create(self.settings, tenant, {"submit", "read"}, "faults")

    def work(self, random: Random, *, tokens: tuple[int, int] = (200, 1000), orders: str = "!slow@5") -> Work:
        """A job of so many tokens. Its orders to the scripted engine: by default 200 tokens a second at most."""
        count = random.randrange(*tokens) // 8 * 8
        prompt = f"job {random.getrandbits(32)} {orders}"
        return Work(prompt=prompt, seed=random.getrandbits(40), max_tokens=count, model=self.model)

    def load(self, api_key: str, clients: int, *, tokens: tuple[int, int] = (200, 1000), patient: bool = False) -> Load:
        """Clients that ask for such jobs, one after the other."""
        return Load(self.base_urls, api_key, lambda random: self.work(random, tokens=tokens), clients, patient=patient)

    def load_of(self, api_key: str, works: Sequence[Work]) -> Load:
        """A client for each of these jobs, all at once."""
        return Load(self.base_urls, api_key, each_once(works), len(works))

    def http(self, api_key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {api_key}"}
        return httpx.Client(base_url=self.base_urls[0], headers=headers, timeout=10, trust_env=False)

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Only this worker runs."""
        others = [worker for worker in self.workers if worker != name]
        for other in others:
            self.processes[other].stop(grace_s=20)
        try:
            yield
        finally:
            for other in others:
                self.spawn(other)

    @contextmanager
    def checked(self) -> Iterator[tuple[str, Checker]]:
        """A fresh tenant's API key, and a checker of its jobs."""
        tenant, api_key = self.tenant()
        checker = Checker(self.settings, tenant)
        try:
            yield api_key, checker
        finally:
            checker.close()

    @property
    def proxies(self) -> dict[str, FaultProxy]:
        return {"redis": self.to_valkey, "rabbitmq": self.to_rabbitmq}


def until(wanted: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not wanted():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
