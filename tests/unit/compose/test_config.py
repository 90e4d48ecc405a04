"""What is written as lingbot.toml is what is read from it."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from pydantic import SecretStr

from brokers.errors import ConfigurationError
from compose import config


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    values = {
        "region": "eu1",
        "port": 8123,
        "drain_s": 2.5,
        "models_dir": tmp_path / "a folder",
        "seal_keys": {"k 1": SecretStr('quote " and \\ and é')},
        "regions": {"eu1": {"amqp": "amqp://x", "redis": "redis://x", "management": None}},
        "list": ["a", 1, True],
    }
    read = tomllib.loads(config.to_toml(values))
    assert read == {
        "region": "eu1",
        "port": 8123,
        "drain_s": 2.5,
        "models_dir": str(tmp_path / "a folder"),
        "seal_keys": {"k 1": 'quote " and \\ and é'},
        "regions": {"eu1": {"amqp": "amqp://x", "redis": "redis://x"}},
        "list": ["a", 1, True],
    }


def test_reading_another_file_leaves_the_environment_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINGBOT_CONFIG", "elsewhere")
    path = tmp_path / "lingbot.toml"
    path.write_text('region = "eu1"\n')
    assert config.read(path, port=1234).region == "eu1"
    path.write_text("no_such_setting = 1\n")
    with pytest.raises(ConfigurationError, match="no_such_setting"):
        config.read(path)
    assert os.environ["LINGBOT_CONFIG"] == "elsewhere"
