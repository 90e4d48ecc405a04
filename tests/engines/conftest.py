"""Every engine there is, around a model that is loaded once: an engine is new in every test.

vLLM is one of them where it is installed (`make test-vllm`), else its tests are skipped.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from brokers.job import Kind
from brokers.models import Card
from tests.engines.driving import Driver
from workers.engine.build import EngineCard, build_model, read_card
from workers.engine.guide import GuideMaker
from workers.engine.loop import BatchEngine
from workers.engine.protocol import Engine
from workers.engine.wire import EngineOptions
from workers.weights.folder import write_card
from workers.weights.scripted import byte_tokenizer, create_scripted_model

OPTIONS = EngineOptions(slots=4, kv_tokens=4096, prefix_tokens=2048, threads=1, device="cpu", dtype="float32")
EOS = 257
Maker = Callable[..., Engine]


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    create_scripted_model(models, "scripted", {})
    return models / "scripted"


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama, as small as vLLM's kernels allow (heads of 32)."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,  # large, so that the next token depends on the whole context
        bos_token_id=256,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    card = Card(
        name="llama", kind=Kind.TEXT, engine="transformers", max_context=2048, vocab_size=259, eos_token_ids=(EOS,)
    )
    write_card(folder, card)
    return folder


@pytest.fixture(scope="session")
def vllm_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed in this environment; `make test-vllm`")


@pytest.fixture(scope="session")
def scripted(scripted_folder: Path) -> Maker:
    return _batch_maker(scripted_folder, read_card(scripted_folder))


@pytest.fixture(scope="session")
def generic(llama_folder: Path) -> Maker:
    return _batch_maker(llama_folder, msgspec.structs.replace(read_card(llama_folder), options={"forward": "generic"}))


@pytest.fixture(scope="session")
def lean(llama_folder: Path) -> Maker:
    return _batch_maker(llama_folder, read_card(llama_folder))


@pytest.fixture(scope="session")
def vllm(vllm_installed: None, llama_folder: Path) -> Iterator[Maker]:
    from workers.engine import vllm_engine

    card = read_card(llama_folder)
    thread = vllm_engine.start(llama_folder, card, OPTIONS)

    def make(**changes: object) -> Engine:
        clock = changes.pop("clock", None)
        options = msgspec.structs.replace(OPTIONS, **changes)
        named = {} if clock is None else {"clock": clock}
        capabilities = vllm_engine.capabilities(card, options)
        return vllm_engine.VllmEngine(thread, capabilities, options, card.eos_token_ids, **named)  # type: ignore[arg-type]

    yield make
    thread.close()


@pytest.fixture(params=["scripted", "generic", "lean", pytest.param("vllm", marks=pytest.mark.vllm)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(request: pytest.FixtureRequest, kind: str) -> Iterator[Callable[..., Driver]]:
    """Makes an engine to drive; keyword arguments are `slots` and `clock`."""
    maker: Maker = request.getfixturevalue(kind)
    made: list[Driver] = []

    def new(**changes: object) -> Driver:
        for driver in made:  # one at a time: vLLM is there once
            driver.clear()
        made.append(Driver(maker(**changes)))
        return made[-1]

    yield new
    for driver in made:
        driver.clear()


def _batch_maker(folder: Path, card: EngineCard) -> Maker:
    model = build_model(folder, card, OPTIONS)
    return partial(
        BatchEngine,
        model,
        slots=OPTIONS.slots,
        kv_tokens=OPTIONS.kv_tokens,
        prefix_tokens=OPTIONS.prefix_tokens,
        eos_ids=card.eos_token_ids,
        guides=GuideMaker(folder / "tokenizer.json", model.vocab_size, card.eos_token_ids),
    )
