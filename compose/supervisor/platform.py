"""The parts of a one-machine platform, from a state folder: which processes, on which ports, with which settings."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Sequence

from brokers import names, topology
from brokers.errors import ConfigurationError
from brokers.job import WORD, Kind, Lane
from brokers.keys import SCOPES
from brokers.models import Registry
from brokers.settings import Settings
from compose import commands, config, keys, probes
from compose.servers import PortBook, Process, RabbitMQ, Server, Service, Valkey, secret
from compose.servers.ports import is_free
from compose.supervisor.folder import StateFolder
from compose.supervisor.supervisor import Step, Tier

_PREFERRED = {"api": 8000, "flower": 5555}
_CALLED = {"api": "the API", "flower": "Flower"}
DEV_TENANT = "dev"
_DRAIN_S = 5.0  # who pressed Ctrl-C waits; a job that runs longer goes on after the next start


class Platform:
    """RabbitMQ with a vhost per region, one Valkey, and per region an API, a worker, a reconciler and Flower.

    Raises ServerMissing, and ConfigurationError when a region's name is bad or no model is there.
    """

    def __init__(self, folder: StateFolder, regions: Sequence[str] = ("local",)) -> None:
        _check(regions)
        cards = [model.card for model in Registry(folder.models).all()]
        if not cards:
            raise ConfigurationError(
                f"there is no model in {folder.models}",
                hint="`make run` brings a small one; `lingbot models import PATH` takes any folder or GGUF file.",
            )
        self.folder = folder
        self.regions = tuple(regions)
        self.ports = PortBook(folder.ports)
        self.rabbitmq = RabbitMQ(
            folder.root / "rabbitmq", regions=self.regions, ports=self.ports, log=folder.log("rabbitmq")
        )
        self.valkey = Valkey(folder.root / "valkey", ports=self.ports, log=folder.log("valkey"))
        self.flower_password = secret.kept(folder.flower_password)
        self._write_config()
        self.settings = {
            region: config.read(folder.config, region=region, port=self._port("api", region)) for region in self.regions
        }
        self.models = [card.name for card in cards]
        self.text_models = [card.name for card in cards if card.kind is Kind.TEXT]
        self.rabbitmq.consumer_timeout_s = max(topology.held_s(own) for own in self.settings.values())

    def tiers(self) -> list[Tier]:
        services = [service for region in self.regions for service in self._services(region)]
        # After the workers: it asks them for their settings and queues when it starts, and waits for no latecomer.
        flowers = [self._flower(region) for region in self.regions]
        self.ports.forget_others()
        self.ports.save()
        return [
            Tier([self.rabbitmq, self.valkey], then=Step("preparing queues and key", self._prepare)),
            Tier(services),
            Tier(flowers),
        ]

    @property
    def dev_key(self) -> str:
        return self.folder.dev_key.read_text().strip()

    @property
    def api_url(self) -> str:
        return self._url("api", self.regions[0])

    @property
    def flower_url(self) -> str:
        return self._url("flower", self.regions[0])

    def moved(self) -> list[str]:
        """Who listens elsewhere than usual because somebody else is there, one sentence each."""
        found = ((part, usual, self._port(part, self.regions[0])) for part, usual in _PREFERRED.items())
        return [
            f"{usual} is taken: {_CALLED[part]} listens on {port}"
            for part, usual, port in found
            if port != usual and not is_free(usual)
        ]

    def _services(self, region: str) -> list[Server]:
        own = self.settings[region]
        api_url = self._url("api", region)
        queue = names.queue(region, self.models[0], Lane.INTERACTIVE)
        return [
            self._service("api", own, commands.api(), lambda: probes.api_ready(api_url), stop_grace_s=8),
            # It consumes only once its models are loaded, and stops once its jobs have ended or are handed back.
            self._service(
                "worker",
                own,
                commands.worker(own, self.models),
                lambda: probes.consumed(own, queue),
                start_timeout_s=300,
                stop_grace_s=own.drain_s + 15,
                stop_means="end its jobs or hand them back",
            ),
            self._service("reconciler", own, commands.reconciler(), lambda: probes.has_leader(own)),
        ]

    def _flower(self, region: str) -> Server:
        own, url = self.settings[region], self._url("flower", region)
        extra = commands.flower_environment(own, port=self._port("flower", region), password=self.flower_password)
        return self._service("flower", own, commands.flower(), lambda: probes.flower_ready(url), extra=extra)

    def _service(
        self,
        part: str,
        settings: Settings,
        argv: Sequence[str],
        probe: Callable[[], bool],
        *,
        start_timeout_s: float = 60,
        stop_grace_s: float = 5,
        stop_means: str = "end",
        extra: dict[str, str] | None = None,
    ) -> Server:
        name = self._name(part, settings.region)
        own = commands.environment(self.folder.config, region=settings.region, port=settings.port)
        process = Process(
            name, argv, env=own | (extra or {}), log=self.folder.log(name), pid_file=self.folder.pid_file(name)
        )
        return Service(
            process, probe, start_timeout_s=start_timeout_s, stop_grace_s=stop_grace_s, stop_means=stop_means
        )

    def _prepare(self) -> None:
        for own in self.settings.values():
            topology.declare(own, self.models)
        first = self.settings[self.regions[0]]
        if not (self.folder.dev_key.exists() and keys.known(first, self.dev_key)):
            made = keys.create(first, DEV_TENANT, SCOPES, "development")
            secret.write_private(self.folder.dev_key, made + "\n")

    def _write_config(self) -> None:
        seal_key = secret.kept(
            self.folder.root / "seal.key", lambda: base64.b64encode(secrets.token_bytes(32)).decode()
        )
        values = {
            "region": self.regions[0],
            "port": self._port("api", self.regions[0]),
            "models_dir": self.folder.models,
            "runtime_dir": self.folder.run,
            "drain_s": _DRAIN_S,
            "seal_keys": {"k1": seal_key},
            "regions": {region: self._reach(region) for region in self.regions},
        }
        secret.write_private(self.folder.config, config.to_toml(values))

    def _reach(self, region: str) -> dict[str, str]:
        return {
            "amqp": self.rabbitmq.url(region),
            "redis": self.valkey.url,
            "management": self.rabbitmq.management_url,
        }

    def _url(self, part: str, region: str) -> str:
        return f"http://127.0.0.1:{self._port(part, region)}"

    def _port(self, part: str, region: str) -> int:
        return self.ports.take(self._name(part, region), _PREFERRED[part])

    def _name(self, part: str, region: str) -> str:
        return part if region == self.regions[0] else f"{part}-{region}"


def _check(regions: Sequence[str]) -> None:
    for region in regions:
        if not WORD.match(region):
            raise ConfigurationError(f"{region[:40]!r} is no region: use a-z and 0-9, at most 32 characters")
    if len(set(regions)) != len(regions) or not regions:
        raise ConfigurationError("name each region once, and at least one")
