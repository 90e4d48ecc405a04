"""Every exchange, queue, key, stream and task name, as functions. Nobody else spells one."""

from __future__ import annotations

from functools import lru_cache
from zlib import crc32

from brokers.job import Kind, Lane

VERSION = 1
"""Of the envelope and of the function library; it is part of their names, so that two versions live side by side."""

ACCEPTED = tuple(range(max(1, VERSION - 1), VERSION + 1))
"""Versions of envelopes that a worker takes. Upgrade workers first, then what publishes."""

EXCHANGE = "gen"
DEAD_EXCHANGE = "gen.dead"

_LANES = frozenset(lane.value for lane in Lane)

FUNCTION_LIBRARY = f"lingbot{VERSION}"


def queue(region: str, model: str, lane: Lane) -> str:
    return f"gen.{region}.{model}.{lane}"


def lane_of(queue_name: str) -> Lane | None:
    """The lane that a queue serves; None for a queue that is no lane's."""
    lane = queue_name.rpartition(".")[2]
    return Lane(lane) if queue_name.startswith("gen.") and lane in _LANES else None


def routing_key(model: str, lane: Lane) -> str:
    return f"{model}.{lane}"


def dead_queue(region: str) -> str:
    return f"gen.{region}.dead"


def task(kind: Kind, version: int = VERSION) -> str:
    return f"lingbot.{kind}.v{version}"


def function(verb: str) -> str:
    return f"lb{VERSION}_{verb}"


@lru_cache(maxsize=8192)
def partition(job_id: str, partitions: int) -> str:
    """`{pNN}`: a Redis Cluster hash tag, so that a job's keys share a slot and many jobs share one XREAD."""
    return partition_at(crc32(job_id.encode()) % partitions)


def partition_at(index: int) -> str:
    return f"{{p{index:02d}}}"


def record(region: str, part: str, job_id: str) -> str:
    return f"lb:{region}:{part}:job:{job_id}"


def stream(region: str, part: str, tenant: str, job_id: str) -> str:
    return f"lb:{region}:{part}:out:{tenant}:{job_id}"


def live(region: str, part: str) -> str:
    """Sorted set of the jobs that have not ended, scored by when the reconciler looks at them next."""
    return f"lb:{region}:{part}:live"


def webhooks(region: str, part: str) -> str:
    """Sorted set of the jobs whose end is to be told, scored by the ms of the next try."""
    return f"lb:{region}:{part}:webhooks"


def dead_webhooks(region: str, part: str) -> str:
    """Sorted set of the jobs whose end could not be told, scored by the ms at which that was given up."""
    return f"lb:{region}:{part}:webhooks:dead"


def tenant_jobs(region: str, part: str, tenant: str) -> str:
    """Sorted set of a tenant's job ids in one partition, scored by creation time."""
    return f"lb:{region}:{part}:jobs:{tenant}"


def idempotency(region: str, part: str, tenant: str, key_digest: str) -> str:
    """Hash of one Idempotency-Key of a tenant; `part` is that of the digest."""
    return f"lb:{region}:{part}:idem:{tenant}:{key_digest}"


def usage(region: str, tenant: str, day: str) -> str:
    """Hash of a tenant's usage in one UTC day, `2026-11-30`; it shares its slot with `settled`."""
    return f"lb:{region}:{{t{tenant}}}:usage:{day}"


def settled(region: str, tenant: str) -> str:
    """Sorted set of the jobs that are in a tenant's usage."""
    return f"lb:{region}:{{t{tenant}}}:settled"


def wake(region: str, part: str, process: str) -> str:
    """Stream that interrupts a blocked XREAD of one API process."""
    return f"lb:{region}:{part}:wake:{process}"


def durable(region: str, part: str) -> str:
    """Written in order to wait until what came before it is on disk."""
    return f"lb:{region}:{part}:durable"


def hints(region: str) -> str:
    """Pub/sub channel on which workers hear of cancels at once; the durable flag is in the record."""
    return f"lb:{region}:hints"


def api_keys(region: str) -> str:
    """Hash of API keys, by the SHA-256 of the whole key."""
    return f"lb:{region}:keys"


def leader(region: str) -> str:
    return f"lb:{region}:leader"


def workers(region: str) -> str:
    """Hash of what each worker last said of itself, by its name."""
    return f"lb:{region}:workers"


def meta(region: str) -> str:
    """Hash of what must not change after the first start: partitions, key-layout version."""
    return f"lb:{region}:meta"
