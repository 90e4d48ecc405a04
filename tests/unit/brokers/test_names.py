"""Names that other systems see, spelled out: changing one is a change of the wire contract."""

from __future__ import annotations

import pytest

from brokers import names
from brokers.job import Kind, Lane, home_of, new_job_id


def test_names_are_those_of_the_contract() -> None:
    part = names.partition_at(7)
    assert names.queue("eu", "smol-1.5", Lane.BATCH) == "gen.eu.smol-1.5.batch"
    assert names.task(Kind.TEXT) == "lingbot.text.v1"
    assert names.stream("eu", part, "acme", "eu01") == "lb:eu:{p07}:out:acme:eu01"
    assert names.record("eu", part, "eu01") == "lb:eu:{p07}:job:eu01"


def test_partitions_are_stable_and_spread() -> None:
    ids = [new_job_id("eu") for _ in range(4000)]
    found = {names.partition(job_id, 64) for job_id in ids}
    assert len(found) == 64
    assert names.partition("eu01m8q2p84wbv9gdkm3grfj7b0p", 64) == "{p63}"


@pytest.mark.parametrize("lane", list(Lane))
def test_a_queue_tells_its_lane_even_when_the_model_has_dots(lane: Lane) -> None:
    assert names.lane_of(names.queue("eu", "a.b.batch", lane)) is lane


@pytest.mark.parametrize("queue", ["celery", "gen.eu.dead", "other.batch"])
def test_other_queues_have_no_lane(queue: str) -> None:
    assert names.lane_of(queue) is None


def test_a_job_id_names_its_home() -> None:
    job_id = new_job_id("eucentral1")
    assert home_of(job_id) == "eucentral1"
    assert job_id.isalnum()
    assert job_id == job_id.lower()


@pytest.mark.parametrize(
    "junk", ["", "eu", "01m8q2p84wbv9gdkm3grfj7b0p", "EU01m8q2p84wbv9gdkm3grfj7b0p", "e:u" + "0" * 26]
)
def test_what_is_no_job_id_has_no_home(junk: str) -> None:
    assert home_of(junk) is None


def test_job_ids_sort_by_time() -> None:
    import time

    early = new_job_id("eu")
    time.sleep(0.002)
    assert early < new_job_id("eu")
