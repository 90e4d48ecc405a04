"""Engines to test: the scripted one, a tiny random Llama, and the demo model where it has been converted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from brokers.job import Kind
from brokers.models import Card
from workers.engine.build import build_model, read_card
from workers.engine.loop import BatchEngine, BatchModel
from workers.engine.wire import EngineOptions
from workers.weights.folder import write_card
from workers.weights.scripted import byte_tokenizer, create_scripted_model

OPTIONS = EngineOptions(slots=4, kv_tokens=2048, threads=1, device="cpu", dtype="float32")
DEMO = "smollm2-135m-instruct"
DEMO_EMBEDDER = "all-minilm-l6-v2"
EngineFactory = Callable[..., BatchEngine]


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    create_scripted_model(models, "scripted", {"directives": True})
    return models / "scripted"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of a few thousand weights: grouped-query attention, rotary positions, all there is."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.5,  # large, so that the next token depends on the whole context
        bos_token_id=256,
        eos_token_id=257,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    card = Card(
        name="tiny", kind=Kind.TEXT, engine="transformers", max_context=512, vocab_size=259, eos_token_ids=(257,)
    )
    write_card(folder, card)
    return folder


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The demo model's folder. Missing, it skips on a laptop and fails in CI."""
    return _imported(DEMO)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """Likewise, of the model that makes embeddings."""
    return _imported(DEMO_EMBEDDER)


def _imported(name: str) -> Path:
    models = Path(os.environ.get("LINGBOT_TEST_MODELS") or Path(__file__).parents[3] / ".lingbot" / "models")
    folder = models / name
    if (folder / "lingbot.json").is_file():
        return folder
    if os.environ.get("CI"):
        pytest.fail(f"{folder} is missing; `lingbot models import` makes it")
    pytest.skip(f"{name} has not been imported")


@pytest.fixture(scope="session")
def loaded(scripted_folder: Path, tiny_folder: Path) -> dict[str, BatchModel]:
    """Each kind of model, loaded once: an engine around it is new in every test."""
    tiny = read_card(tiny_folder)
    generic = msgspec.structs.replace(tiny, options={"forward": "generic"})
    return {
        "scripted": build_model(scripted_folder, read_card(scripted_folder), OPTIONS),
        "lean": build_model(tiny_folder, tiny, OPTIONS),
        "generic": build_model(tiny_folder, generic, OPTIONS),
    }


@pytest.fixture(params=["scripted", "lean", "generic"])
def make_engine(request: pytest.FixtureRequest, loaded: dict[str, BatchModel]) -> EngineFactory:
    """Makes an engine of each kind; keyword arguments are those of BatchEngine."""

    def make(**changes: object) -> BatchEngine:
        arguments = {"slots": OPTIONS.slots, "kv_tokens": OPTIONS.kv_tokens, "eos_ids": (257,), **changes}
        return BatchEngine(loaded[request.param], **arguments)  # type: ignore[arg-type]

    return make
