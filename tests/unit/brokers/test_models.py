"""The model registry: what is in the origin now, whatever else lies there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from brokers import models
from brokers.errors import UnknownModel
from brokers.models import CARD, Registry
from workers.weights.scripted import create_scripted_model


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(models, "_RESCAN_S", 0.0)
    create_scripted_model(tmp_path, "good")
    create_scripted_model(tmp_path, "bad")
    return tmp_path


def names(registry: Registry) -> list[str]:
    return [model.card.name for model in registry.all()]


def change_card(folder: Path, **fields: object) -> None:
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps(card | fields))


def test_models_come_and_go(origin: Path) -> None:
    registry = Registry(origin)
    assert names(registry) == ["bad", "good"]
    create_scripted_model(origin, "new")
    shutil.rmtree(origin / "bad")
    assert names(registry) == ["good", "new"]


@pytest.mark.parametrize(
    "break_it",
    [
        lambda folder: (folder / CARD).write_text("{"),
        lambda folder: change_card(folder, field_of_a_newer_version=1),
        lambda folder: change_card(folder, name="another"),
        lambda folder: change_card(folder, chat_template="{% for"),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "tokenizer.json").write_text("[]"),
        lambda folder: ((folder / CARD).unlink(), (folder / CARD).symlink_to("nowhere")),
    ],
)
def test_a_model_that_cannot_be_read_is_left_out_alone(origin: Path, break_it: object) -> None:
    assert callable(break_it)
    break_it(origin / "bad")
    registry = Registry(origin)
    assert names(registry) == ["good"]
    with pytest.raises(UnknownModel):
        registry.get("bad")


def test_a_model_that_is_mended_is_served_again(origin: Path) -> None:
    registry = Registry(origin)
    change_card(origin / "bad", field_of_a_newer_version=1)
    assert names(registry) == ["good"]
    create_scripted_model(origin, "bad")
    assert names(registry) == ["bad", "good"]
