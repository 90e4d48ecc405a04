"""Whether a part really works, asked from outside: each probe answers within about a second and never raises."""

from __future__ import annotations

import httpx
import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

from brokers import calls, connect, names, topology
from brokers.settings import Settings

_TIMEOUT = httpx.Timeout(1.0)


def api_ready(base_url: str) -> bool:
    return _answers(f"{base_url}/readyz")


def flower_ready(base_url: str) -> bool:
    return _answers(f"{base_url}/healthcheck")


def consumed(settings: Settings, queue: str) -> bool:
    """Whether a worker listens on this queue."""
    try:
        with pika.BlockingConnection(topology.parameters(settings.here.amqp.get_secret_value(), 1.0)) as connection:
            return bool(connection.channel().queue_declare(queue, passive=True).method.consumer_count)
    except (AMQPError, AMQPConnectorException, OSError):
        return False


def has_leader(settings: Settings) -> bool:
    """Whether a reconciler of this region leads."""
    try:
        with connect.blocking(settings, settings.region, timeout_s=1.0) as client:
            return bool(connect.send(client, calls.Call(("EXISTS", names.leader(settings.region)), bool)))
    except connect.ERRORS:
        return False


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=_TIMEOUT, trust_env=False).is_success
    except httpx.HTTPError:
        return False
