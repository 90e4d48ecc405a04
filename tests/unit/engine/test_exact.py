"""Exact mode: the same text to the bit, alone or batched, whole or in pieces, interrupted anywhere, begun by others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from tests.unit.engine.conftest import OPTIONS
from tests.unit.engine.driving import Record, drain
from workers.engine.build import build_engine
from workers.engine.linear import Linear
from workers.engine.loop import BatchEngine
from workers.engine.protocol import Request, SamplingParams

EXACT = msgspec.structs.replace(OPTIONS, exact=True)
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="this build of torch has no oneDNN",
)


@needs_onednn
@pytest.mark.parametrize(("wide", "deep"), [(960, 576), (576, 1536), (259, 48), (3072, 576)])
def test_a_row_of_a_product_has_the_same_bits_whoever_is_beside_it(wide: int, deep: int) -> None:
    torch.manual_seed(wide)
    product, x, other = Linear(torch.randn(wide, deep)), torch.randn(130, deep), torch.randn(130, wide)
    forms = (product, product.silu, lambda x: product.times(other[: len(x)], x))
    for form in (*forms, lambda x: product.added_to(other[: len(x)], x)):
        whole = form(x)
        assert [rows for rows in (1, 2, 3, 7, 15, 16, 17, 64) if not torch.equal(form(x[:rows]), whole[:rows])] == []


def _requests(vocabulary: int, count: int, longest: int, seed: int) -> list[Request]:
    """Half of them greedy, a third of them with a common beginning."""
    chance = random.Random(seed)
    common = tuple(chance.randrange(vocabulary) for _ in range(70))
    return [
        Request(
            str(number),
            (common if number % 3 == 0 else ())
            + tuple(chance.randrange(vocabulary) for _ in range(chance.randrange(1, longest))),
            sampling=SamplingParams(
                max_tokens=chance.randrange(8, 40), temperature=number % 2, seed=chance.getrandbits(30), ignore_eos=True
            ),
        )
        for number in range(count)
    ]


def _alone(folder: Path, requests: Sequence[Request]) -> list[list[int]]:
    engine, texts = build_engine(folder, EXACT), []
    for request in requests:
        record = Record()
        engine.submit(request)
        drain(engine, record)
        texts.append(record.tokens[request.seq])
    return texts


def _together(engine: BatchEngine, requests: Sequence[Request]) -> list[list[int]]:
    record = Record()
    for request in requests:
        engine.submit(request)
        record.take(engine.step())
    drain(engine, record)
    return [record.tokens[request.seq] for request in requests]


def _interrupted(request: Request, text: list[int], chance: random.Random) -> Request:
    return msgspec.structs.replace(request, output=tuple(text[: chance.randrange(1, len(text))]))


def _holds(folder: Path, requests: Sequence[Request]) -> None:
    engine = build_engine(folder, msgspec.structs.replace(EXACT, prefix_tokens=1024))
    assert engine.capabilities.exact
    texts = _alone(folder, requests)
    assert _together(engine, requests) == texts
    chance = random.Random(0)
    resumed = [_interrupted(request, text, chance) for request, text in zip(requests, texts, strict=True)]
    rest = [text[len(request.output) :] for request, text in zip(resumed, texts, strict=True)]
    assert _together(engine, resumed) == rest
    assert engine.stats().reused_tokens > 0


@needs_onednn
def test_a_text_is_the_same_alone_batched_and_resumed(tiny_folder: Path) -> None:
    _holds(tiny_folder, _requests(256, count=12, longest=200, seed=5))


@needs_onednn
@pytest.mark.model
def test_a_text_of_the_demo_model_is_the_same_alone_batched_and_resumed(smollm2_dir: Path) -> None:
    _holds(smollm2_dir, _requests(49_152, count=8, longest=150, seed=6))


def test_other_numbers_and_other_forwards_promise_nothing(tiny_folder: Path) -> None:
    coarse = msgspec.structs.replace(EXACT, dtype="bfloat16")
    assert not build_engine(tiny_folder, coarse).capabilities.exact
    assert not build_engine(tiny_folder, OPTIONS).capabilities.exact
