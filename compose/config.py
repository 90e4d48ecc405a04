"""The lingbot.toml that every process reads: written, and read from where we say."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from brokers import settings
from brokers.settings import Settings


def read(path: Path, **overrides: object) -> Settings:
    """The settings in this file; `overrides` win. Raises ConfigurationError."""
    before = os.environ.get("LINGBOT_CONFIG")
    os.environ["LINGBOT_CONFIG"] = str(path)
    try:
        return settings.read(**overrides)
    finally:
        if before is None:
            del os.environ["LINGBOT_CONFIG"]
        else:
            os.environ["LINGBOT_CONFIG"] = before


def to_toml(values: Mapping[str, Any]) -> str:
    """TOML of nested mappings, strings, numbers, booleans, lists of these, paths and secrets."""
    return "\n".join(_table(values, ())) + "\n"


def _table(values: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lines = [
        f"{_key(key)} = {_value(value)}" for key, value in values.items() if key not in tables and value is not None
    ]
    if path and (lines or not tables):
        lines.insert(0, f"\n[{'.'.join(map(_key, path))}]")
    for key, value in tables.items():
        lines += _table(value, (*path, key))
    return lines


def _value(value: Any) -> str:
    if isinstance(value, SecretStr):
        return _value(value.get_secret_value())
    if isinstance(value, Path):
        return _value(str(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False)  # JSON's strings, numbers and booleans are TOML's


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)
