"""Unpacks a GGUF file once, so that workers load plain safetensors in two seconds instead of twenty."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from brokers.errors import ConfigurationError

_QUANTIZER_TRACES = ("hf_quantizer", "quantization_method", "is_quantized")


def dequantise(source: Path, folder: Path, tell: Callable[[str, float], None]) -> str | None:
    """Write weights (bf16 safetensors), configuration, tokenizer and chat template into `folder`.

    Returns the licence that the file names. Raises ConfigurationError when transformers cannot read it.
    """
    tell("loading the converter", 0.0)
    import torch  # seconds and 300 MB: only for who converts
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place, file = str(source.parent), source.name
    try:
        tell("reading the tokenizer", 0.2)
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file, local_files_only=True)
        tell("dequantising the weights", 0.4)
        with redirect_stderr(io.StringIO()):  # its progress bars would be drawn across ours
            model = AutoModelForCausalLM.from_pretrained(
                place,
                gguf_file=file,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
            )
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    tell("writing safetensors", 0.8)
    _forget_quantizer(model)
    with redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return _licence(source)


def _forget_quantizer(model: Any) -> None:
    """save_pretrained refuses a model that was quantized, though its weights are plain tensors by now."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name in _QUANTIZER_TRACES:
        if hasattr(model, name):
            delattr(model, name)


def _licence(source: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(source).get_field("general.license")
    return None if field is None else str(field.contents())
