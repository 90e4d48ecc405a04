"""Settings are read once, and a bad one is named and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from brokers import settings
from brokers.errors import ConfigurationError
from brokers.job import Lane


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LINGBOT_CONFIG", raising=False)


def test_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lingbot.toml").write_text('region = "eu"\nport = 9000\n')
    monkeypatch.setenv("LINGBOT_PORT", "9001")
    read = settings.read()
    assert (read.region, read.port) == ("eu", 9001)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("port = 'secret-value'", "port"),
        ("partitions = 0", "partitions"),
        ("colour = 'secret-value'", "colour"),
        ("region = 'Secret-Value'", "region"),
        ("[regions.local]\namqp = 'secret-value'", "regions.local.redis"),
    ],
)
def test_a_bad_setting_is_named_and_not_shown(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "lingbot.toml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        settings.read()
    assert named in caught.value.message
    assert "secret-value" not in caught.value.message.lower()


def test_a_named_file_that_is_missing_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINGBOT_CONFIG", "/nowhere/lingbot.toml")
    with pytest.raises(ConfigurationError, match="/nowhere"):
        settings.read()


def test_an_unknown_region_is_named() -> None:
    with pytest.raises(ConfigurationError, match="mars"):
        settings.read(region="eu").reach("mars")


def test_the_batch_lane_holds_fewer_messages() -> None:
    read = settings.read(slots=16)
    assert [read.prefetch(lane) for lane in Lane] == [16, 16, 8]
