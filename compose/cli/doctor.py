"""`lingbot doctor`: looks at each part, says what is wrong and how to mend it."""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx
import msgspec
import redis
from rich.markup import escape

from brokers import calls, connect, names, topology
from brokers import settings as settings_module
from brokers.errors import BrokerUnavailable, LingbotError
from brokers.job import Lane
from brokers.models import CARD, read_card
from brokers.settings import Settings
from brokers.status import SILENT_MS
from compose import probes
from compose.cli import output, target
from compose.commands import FLOWER_USER
from compose.servers import rabbitmq, secret
from compose.supervisor.folder import StateFolder

_TIMEOUT = httpx.Timeout(5.0)
_DISK_BYTES = 2 << 30  # RabbitMQ blocks publishers below 256 MB; be told well before
_OLDEST_REDIS = 7


class Fault(Exception):
    """What is wrong with a part, and how to mend it."""

    def __init__(self, what: str, mend: str) -> None:
        super().__init__(what)
        self.mend = mend


class Finding(NamedTuple):
    """One part's result; `mend` is empty when all is well."""

    part: str
    ok: bool
    detail: str
    mend: str = ""


def examine() -> Iterator[Finding]:
    """Every part in turn; a check that finds a fault does not stop the next one."""
    state = target.nearest_state()
    folder = StateFolder(state) if state else None
    found: list[Settings] = []
    yield _finding("settings", lambda: _settings(found, folder))
    if not found:
        return
    settings = found[0]
    checks: dict[str, Callable[[], str]] = {
        "disk": lambda: _disk(settings),
        "models": lambda: _models(settings),
        "RabbitMQ": lambda: _rabbitmq(settings),
        "queues": lambda: _queues(settings),
        "Redis": lambda: _redis(settings),
        "functions": lambda: _functions(settings),
        "API": lambda: _api(settings),
        "workers": lambda: _workers(settings),
        "reconciler": lambda: _reconciler(settings),
    }
    if folder is not None:
        checks["Flower"] = lambda: _flower(folder)
    for part, check in checks.items():
        yield _finding(part, check)


def report(findings: Iterator[Finding], *, as_json: bool) -> bool:
    """Show each finding as it comes; whether all is well."""
    shown = []
    for finding in findings:
        shown.append(finding)
        if not as_json:
            mark = "[green]ok[/]   " if finding.ok else "[red]fault[/]"
            output.out().print(f"{mark}  {finding.part:11} {escape(finding.detail)}", soft_wrap=True)
            if finding.mend:
                output.out().print(f"{'':19} [dim]{escape(finding.mend)}[/]", soft_wrap=True)
    if as_json:
        output.show_json([finding._asdict() for finding in shown])
    return all(finding.ok for finding in shown)


def _finding(part: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(part, True, check())
    except Fault as fault:
        return Finding(part, False, str(fault), fault.mend)
    except LingbotError as error:
        return Finding(part, False, error.message, error.advice)


def _settings(found: list[Settings], folder: StateFolder | None) -> str:
    settings = settings_module.read()
    if not settings.regions:
        raise Fault("no region is configured", "Start a platform with `lingbot up`, or name a file in LINGBOT_CONFIG.")
    if not settings.seal_keys:
        raise Fault("no seal key is set", "Put 32 random bytes, in base64, under seal_keys.")
    found.append(settings)
    if folder and folder.config.exists() and stat.S_IMODE(folder.config.stat().st_mode) & 0o077:
        raise Fault(f"others may read {folder.config}, which holds passwords", f"chmod 600 {folder.config}")
    settings.here  # noqa: B018  raises when this region has no address
    return f"region {settings.region} of {', '.join(settings.regions)}"


def _disk(settings: Settings) -> str:
    place = next(p for p in (settings.runtime_dir, *settings.runtime_dir.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < _DISK_BYTES:
        raise Fault(f"{free / 1e9:.1f} GB free", "Free some space: RabbitMQ takes no messages on a full disk.")
    return f"{free / 1e9:.0f} GB free"


def _models(settings: Settings) -> str:
    cards = [read_card(path.parent) for path in sorted(settings.models_dir.glob(f"*/{CARD}"))]
    if not cards:
        raise Fault(f"no model in {settings.models_dir}", "lingbot models import PATH")
    for card in cards:
        weights = list((settings.models_dir / card.name).glob("*.safetensors"))
        if card.engine == "transformers" and not weights:
            raise Fault(
                f"model {card.name} has no weights", f"Import it again: lingbot models import PATH --name {card.name}"
            )
    return ", ".join(card.name for card in cards)


def _rabbitmq(settings: Settings) -> str:
    if not rabbitmq.can_log_in(settings.here.amqp.get_secret_value()):
        raise Fault("nobody can log in", "`lingbot up` starts it; its log is .lingbot/logs/rabbitmq.log.")
    if settings.here.management is None:
        return "login works; its management address is not set, so status and Flower show no queues"
    base = settings.here.management.get_secret_value()
    overview = _ask(f"{base}/api/overview").json()
    alarms = _ask(f"{base}/api/health/checks/alarms")
    if alarms.is_error:
        raise Fault("an alarm blocks publishers: " + alarms.json().get("reason", ""), "Free memory or disk space.")
    return f"version {overview['rabbitmq_version']}, {overview['object_totals']['connections']} connections"


def _queues(settings: Settings) -> str:
    models = _model_names(settings)
    try:
        faults = topology.check(settings, models)
    except BrokerUnavailable:
        raise Fault("not known while RabbitMQ is away", "Mend RabbitMQ first.") from None
    if faults:
        raise Fault(
            "; ".join(faults),
            "Drain and delete the queue, or restore the setting; `lingbot up` declares what is missing.",
        )
    return f"{len(topology.queues(settings, settings.region, models))} as they should be"


def _redis(settings: Settings) -> str:
    with _redis_client(settings) as client:
        return ", ".join(sorted({_redis_server(server) for server in connect.primaries(client)}))


def _redis_server(server: redis.Redis) -> str:
    info = server.info()
    appending = server.config_get("appendonly").get("appendonly")
    version = str(info.get("valkey_version") or info["redis_version"])
    if int(version.split(".", maxsplit=1)[0]) < _OLDEST_REDIS:
        raise Fault(f"version {version} knows no functions", "Install Valkey, or Redis 7 or newer.")
    if info.get("maxmemory_policy") != "noeviction":
        raise Fault(
            f"it evicts ({info.get('maxmemory_policy')}): streams would vanish",
            "CONFIG SET maxmemory-policy noeviction",
        )
    if appending != "yes":
        raise Fault("it writes no append-only file: a restart loses every job", "CONFIG SET appendonly yes")
    return f"version {version}, {info['used_memory_human']} used, noeviction, append-only"


def _functions(settings: Settings) -> str:
    with _redis_client(settings) as client:
        lacking = [s for s in connect.primaries(client) if not s.function_list(names.FUNCTION_LIBRARY)]
    if lacking:
        raise Fault(f"the library {names.FUNCTION_LIBRARY} is not loaded", "Start an API or a worker: each loads it.")
    return f"library {names.FUNCTION_LIBRARY} is loaded"


def _api(settings: Settings) -> str:
    url = f"http://{settings.host}:{settings.port}"
    answer = _ask(f"{url}/readyz")
    if answer.is_error:
        parts = answer.json().get("parts", {})
        broken = ", ".join(f"{part} {state}" for part, state in parts.items() if state != "ok")
        raise Fault(
            f"not ready: {broken or answer.status_code}",
            "Mend the part that is named; its log is .lingbot/logs/api.log.",
        )
    return f"ready at {url}"


def _workers(settings: Settings) -> str:
    with _redis_client(settings) as client:
        raw = connect.send(client, calls.Call(("HVALS", names.workers(settings.region)), list))
    reports = [msgspec.json.decode(report) for report in raw]
    alive = [report for report in reports if report["at_ms"] >= time.time() * 1000 - SILENT_MS]
    if not alive:
        raise Fault(
            "no worker reports",
            "One that has just died is started again by `lingbot up`, and reports when its models are loaded; "
            "elsewhere `lingbot worker` starts one. Its log is .lingbot/logs/worker.log.",
        )
    for report in alive:
        if report["state"] == "engine_down":
            raise Fault(f"an engine of {report['name']} is down", "See .lingbot/logs/worker.log.")
    for model in _model_names(settings):
        queue = names.queue(settings.region, model, Lane.STANDARD)
        if not probes.consumed(settings, queue):
            raise Fault(f"no worker takes jobs for {model}", f"lingbot worker --models {model}")
    return ", ".join(report["name"] for report in alive)


def _reconciler(settings: Settings) -> str:
    if not probes.has_leader(settings):
        raise Fault("none leads", "`python -m brokers.reconciler` starts one; its log is .lingbot/logs/reconciler.log.")
    return "one leads"


def _flower(folder: StateFolder) -> str:
    port = folder.port("flower")
    if port is None or not folder.flower_password.exists():
        raise Fault("it was never started here", "`lingbot up` starts it.")
    url = f"http://127.0.0.1:{port}"
    if not _ask(f"{url}/api/workers").is_client_error:
        raise Fault("it lets everybody in", "Start it with FLOWER_BASIC_AUTH set, as `lingbot up` does.")
    if _ask(f"{url}/api/workers", (FLOWER_USER, secret.kept(folder.flower_password))).is_error:
        raise Fault("its login does not work", "Restart the platform: lingbot down, lingbot up.")
    return f"asks for a login at {url}"


def _ask(url: str, login: tuple[str, str] | None = None) -> httpx.Response:
    try:
        return httpx.get(url, auth=login, timeout=_TIMEOUT, trust_env=False)
    except httpx.HTTPError as error:
        shown = httpx.URL(url).copy_with(username=None, password=None)
        raise Fault(
            f"{shown} does not answer ({type(error).__name__})", "`lingbot up` starts it; see .lingbot/logs."
        ) from None


@contextmanager
def _redis_client(settings: Settings) -> Iterator[connect.Blocking]:
    try:
        with connect.blocking(settings, settings.region, timeout_s=3.0) as client:
            yield client
    except connect.ERRORS as error:
        mend = "`lingbot up` starts it; its log is .lingbot/logs/valkey.log."
        raise Fault(f"it does not answer ({type(error).__name__})", mend) from None


def _model_names(settings: Settings) -> list[str]:
    return sorted(path.parent.name for path in settings.models_dir.glob(f"*/{CARD}"))
