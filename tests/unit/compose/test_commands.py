"""Command lines of the parts: the right queues, and no secret in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from brokers.errors import ConfigurationError
from brokers.job import Lane
from brokers.settings import Region, Settings
from compose import commands, config
from compose.cli.worker import Choice, plan
from workers.weights.scripted import create_scripted_model


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    reach = Region(
        amqp=SecretStr("amqp://u:amqp-secret@h/v"),
        redis=SecretStr("redis://:redis-secret@h"),
        management=SecretStr("http://u:management-secret@h:1"),
    )
    return Settings(region="eu1", regions={"eu1": reach})


def test_a_worker_consumes_the_queues_of_its_region_models_and_lanes(settings: Settings) -> None:
    command = commands.worker(settings, ["a", "b"], lanes=[Lane.BATCH])
    assert command[command.index("-Q") + 1] == "gen.eu1.a.batch,gen.eu1.b.batch"


def test_no_command_line_holds_a_secret(settings: Settings) -> None:
    lines = [commands.api(), commands.worker(settings, ["a"]), commands.reconciler(), commands.flower()]
    assert "secret" not in str(lines)


def test_flower_gets_its_login_by_environment(settings: Settings) -> None:
    environment = commands.flower_environment(settings, port=1, password="pw")
    assert environment["FLOWER_BASIC_AUTH"] == "lingbot:pw"
    assert environment["FLOWER_BROKER_API"] == "http://u:management-secret@h:1/api/"
    assert environment["FLOWER_ADDRESS"] == "127.0.0.1"


def test_settings_of_one_process_are_in_its_environment(tmp_path: Path) -> None:
    environment = commands.environment(tmp_path / "lingbot.toml", region="b", port=81)
    assert environment["LINGBOT_CONFIG"] == str(tmp_path / "lingbot.toml")
    assert (environment["LINGBOT_REGION"], environment["LINGBOT_PORT"]) == ("b", "81")


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configured region whose origin is empty."""
    models = tmp_path / "models"
    models.mkdir()
    path = tmp_path / "lingbot.toml"
    values = {"region": "eu1", "models_dir": models, "regions": {"eu1": {"amqp": "amqp://x", "redis": "redis://x"}}}
    path.write_text(config.to_toml(values))
    monkeypatch.setenv("LINGBOT_CONFIG", str(path))
    return models


def test_a_worker_serves_every_model_and_lane_unless_told_otherwise(origin: Path) -> None:
    for name in ("a", "b"):
        create_scripted_model(origin, name)
    everything, _ = plan(Choice())
    assert everything[everything.index("-Q") + 1].count(",") == 2 * len(Lane) - 1
    one, environment = plan(Choice(models=["b"], lanes=["batch"], name="w2", slots=4, device="cuda:1", engine="vllm"))
    assert one[one.index("-Q") + 1] == "gen.eu1.b.batch"
    assert one[one.index("-n") + 1].startswith("w2.eu1@")
    assert (environment["LINGBOT_SLOTS"], environment["LINGBOT_DEVICE"]) == ("4", "cuda:1")
    assert environment["LINGBOT_ENGINE"] == "vllm"


@pytest.mark.parametrize(
    ("choice", "complaint"),
    [
        (Choice(models=["nope"]), "no such model: nope"),
        (Choice(lanes=["express"]), "express"),
        (Choice(), "holds no model"),
    ],
)
def test_a_worker_with_an_unknown_model_or_lane_is_refused(origin: Path, choice: Choice, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        plan(choice)
