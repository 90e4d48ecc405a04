"""What vLLM is told, and what is refused because it would not be. vLLM itself is not needed here."""

from __future__ import annotations

import msgspec
import pytest

from workers.engine import checks, vllm_engine, vllm_setup
from workers.engine.build import EngineCard, chosen_card
from workers.engine.protocol import Capabilities, Request, SamplingParams
from workers.engine.vllm_setup import Options
from workers.engine.vllm_thread import VllmThread
from workers.engine.wire import EngineOptions

OPTIONS = EngineOptions(slots=2, kv_tokens=512, threads=1, device="cpu", dtype="float32", engine="vllm")
CARD = EngineCard("transformers", 2048, vocab_size=300, options={"forward": "generic"})


def engine() -> vllm_engine.VllmEngine:
    never_started = VllmThread(lambda request: request)
    return vllm_engine.VllmEngine(never_started, vllm_engine.capabilities(CARD, OPTIONS), OPTIONS)


def test_what_vllm_is_not_told_of_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_setup, "_OBEYED", vllm_setup._OBEYED - {"min_p"})
    refusing = engine()
    refusing.submit(Request("a", (1, 2), sampling=SamplingParams(min_p=0.1)))
    refusing.submit(Request("b", (1, 2), sampling=SamplingParams(top_p=0.5)))
    (output,) = refusing._outputs
    assert (output.seq, output.error_code) == ("a", checks.UNSUPPORTED)
    assert "min_p" in str(output.error)


def test_every_field_that_is_said_to_be_obeyed_exists() -> None:
    assert set(SamplingParams.__struct_fields__) >= vllm_setup._OBEYED


def test_a_seed_depends_on_position_and_choice_and_is_a_number_that_torch_takes() -> None:
    request = Request("a", (1, 2), sampling=SamplingParams(seed=-5))
    later = msgspec.structs.replace(request, output=(3,))
    other = msgspec.structs.replace(request, choice=1)
    seeds = {vllm_setup._seed(one) for one in (request, later, other)}
    assert len(seeds) == 3
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert vllm_setup._seed(request) == vllm_setup._seed(msgspec.structs.replace(request, seq="b"))


def test_one_sequence_must_fit_into_the_cache() -> None:
    assert vllm_engine.capabilities(CARD, OPTIONS).max_context == 512
    assert vllm_setup.context(100, OPTIONS) == 100


def test_a_setting_overrides_the_cards_engine_and_leaves_out_options_it_does_not_know() -> None:
    assert chosen_card(CARD, "vllm") == EngineCard("vllm", 2048, vocab_size=300)
    assert chosen_card(CARD, "") == chosen_card(CARD, "transformers") == CARD
    scripted = EngineCard("scripted", 2048)
    assert chosen_card(scripted, "vllm") == scripted


def test_an_unknown_option_of_a_card_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="tensor_paralel"):
        msgspec.convert({"tensor_paralel": 2}, Options)


def test_capabilities_name_what_an_engine_lacks() -> None:
    can = Capabilities(pause=False, keyed_sampling=True, max_context=10, vocab_size=0, exact=True, prefix_cache=False)
    assert can.lacks == ("pause", "prefix_cache", "json_schema")
