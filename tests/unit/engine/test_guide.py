"""Texts held to schemas by a real tokenizer, whose tokens have many characters; and by one that cannot do it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from brokers.models import Model
from tests.engines.driving import Driver
from tests.unit.engine.conftest import OPTIONS
from workers.engine.build import build_engine
from workers.engine.fault import Fault
from workers.engine.guide import GuideMaker
from workers.engine.protocol import Request, SamplingParams

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99999}},
        "required": ["capital", "people"],
        "additionalProperties": False,
    }
)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_demo_model_answers_in_json_wherever_it_is_taken_over(smollm2_dir: Path, temperature: float) -> None:
    model = Model(smollm2_dir)
    ask = model.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    sampling = SamplingParams(max_tokens=120, temperature=temperature, seed=3, json_schema=SCHEMA)
    driver = Driver(build_engine(smollm2_dir, OPTIONS))
    whole = driver.run(Request("whole", ask, sampling=sampling)).tokens["whole"]
    answer = json.loads(model.tokenizer.decode(whole))
    assert set(answer) == {"capital", "people"}
    assert len(answer["capital"]) <= 20
    middles = range(1, len(whole), 5)
    record = driver.run(*(Request(str(at), ask, output=tuple(whole[:at]), sampling=sampling) for at in middles))
    for at in middles:
        assert (record.tokens[str(at)], record.finish(str(at))) == (whole[at:], "stop")


def test_a_tokenizer_without_bytes_is_refused(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"the": 0, "sea": 1}, unk_token="the")).save(str(tmp_path / "tokenizer.json"))
    maker = GuideMaker(tmp_path / "tokenizer.json", vocab_size=2, eos_ids=(1,))
    with pytest.raises(Fault) as caught:
        maker.make(SCHEMA, ()).result()
    assert caught.value.code == "unsupported_by_engine"
