"""When a job starts, and how long it may take."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from brokers.job import Lane
from brokers.settings import Settings
from producers.problems import Problem
from producers.schedules import expires_s, start_ms
from producers.schemas import JobRequest

_NOW = 1_800_000_000.0


@pytest.fixture
def settings() -> Settings:
    return Settings(lane_expires_s={Lane.BATCH: 9000, Lane.INTERACTIVE: 60}, default_expires_s=600, max_expires_s=7200)


def _body(**fields: Any) -> JobRequest:
    return msgspec.convert({"model": "m", **fields}, JobRequest)


@pytest.mark.parametrize(
    ("fields", "after_s"),
    [
        ({}, None),
        ({"delay": 0}, None),
        ({"delay": 1.5}, 1.5),
        ({"start_at": _NOW + 60}, 60),
        ({"start_at": 1}, None),
        ({"start_at": -1e12}, None),
        ({"start_at": "2027-01-15T08:01:00Z"}, 60),
        ({"start_at": "2027-01-15T10:01:00+02:00"}, 60),
        ({"start_at": "2020-01-01T00:00:00Z"}, None),
        ({"delay": 7 * 24 * 3600}, 7 * 24 * 3600),
    ],
)
def test_a_start_is_a_delay_or_a_time(settings: Settings, fields: dict[str, Any], after_s: float | None) -> None:
    expected = None if after_s is None else int((_NOW + after_s) * 1000)
    assert start_ms(settings, _body(**fields), _NOW) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"delay": 7 * 24 * 3600 + 1}, "delay"),
        ({"delay": 1e300}, "delay"),
        ({"start_at": 1e300}, "start_at"),
        ({"start_at": "9999-12-31T23:59:59Z"}, "start_at"),
        ({"start_at": 1, "delay": 1}, "delay"),
    ],
)
def test_a_start_too_far_away_or_told_twice_is_refused(settings: Settings, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Problem) as caught:
        start_ms(settings, _body(**fields), _NOW)
    assert (caught.value.code, caught.value.param) == ("invalid_parameter", param)


def test_how_long_a_job_may_take_is_its_own_then_its_lanes_then_everybodys(settings: Settings) -> None:
    assert expires_s(settings, _body(expires_in=5)) == 5
    assert expires_s(settings, _body(lane="interactive")) == 60
    assert expires_s(settings, _body()) == 600
    assert expires_s(settings, _body(lane="batch")) == 7200  # never above the most
    with pytest.raises(Problem):
        expires_s(settings, _body(expires_in=7201))
