"""A worker's name is its own: two of one name would fight for one control queue, and neither would get far.

The broker knows: a worker's control queue is exclusive to its connection, so whoever else asks about it is refused.
"""

from __future__ import annotations

import logging
import time

from amqp.exceptions import NotFound, ResourceLocked
from celery import Celery

from brokers.errors import ConfigurationError

log = logging.getLogger(__name__)

_LEFT_BEHIND_S = 30.0  # longer than a broker keeps the connection of a machine that was lost, see broker_heartbeat
_AGAIN_S = 1.0


def require_free(app: Celery, name: str) -> None:
    """Wait for the end of a connection that the last worker of this name left behind; a broker that is away is not
    waited for. Raises ConfigurationError when a worker of this name lives."""
    deadline = time.monotonic() + _LEFT_BEHIND_S
    waits = False
    while _taken(app, name):
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"a worker named {name} is connected to this broker already",
                hint="Give this one a name of its own: `lingbot worker --name NAME`, or -n for Celery.",
            )
        if not waits:
            log.warning("the name %s is taken; waiting up to %.0f s for its worker to be gone", name, _LEFT_BEHIND_S)
        waits = True
        time.sleep(_AGAIN_S)


def _taken(app: Celery, name: str) -> bool:
    with app.connection_for_read(connect_timeout=5) as connection:
        try:
            with connection.channel() as channel:
                channel.queue_declare(f"{name}.{app.control.mailbox.namespace}.pidbox", passive=True)
        except ResourceLocked:
            return True
        except NotFound:
            return False
        except connection.connection_errors as error:
            log.warning("whether the name %s is free: %s", name, type(error).__name__)
    return False
