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

from tests.engines.driving import Driver
from tests.random_llama import create_random_llama
from workers.engine.build import EngineCard, build_model, read_card
from workers.engine.guide import GuideMaker
from workers.engine.loop import BatchEngine
from workers.engine.protocol import Engine
from workers.engine.wire import EngineOptions
from workers.weights.scripted import create_scripted_model

OPTIONS = EngineOptions(slots=4, kv_tokens=4096, prefix_tokens=2048, threads=1, device="cpu", dtype="float32")
Maker = Callable[..., Engine]


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    create_scripted_model(models, "scripted", {})
    return models / "scripted"


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_random_llama(tmp_path_factory.mktemp("models"), "llama")


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
