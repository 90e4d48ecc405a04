#!/usr/bin/env bash
# The environment in .venv: torch first, from where it is small and without CUDA, then everything as pinned.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=compose/bootstrap/lib.sh
source compose/bootstrap/lib.sh

: "${TORCH_INDEX:=https://download.pytorch.org/whl/cpu}"
TORCH=$(grep -i '^torch==' constraints.txt)

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

has_torch() {
  .venv/bin/python - "${TORCH#torch==}" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
sys.exit(version("torch").split("+")[0] != sys.argv[1])
PY
}

# A wheel on this machine (TORCH_WHEELS, or the folders pip's own settings name), else the index of CPU builds. The
# general index holds builds with CUDA for Linux, some gigabytes of it.
install_torch() {
  has_torch && return
  say "installing $TORCH"
  local local_wheels=(--no-index)
  if [[ -n ${TORCH_WHEELS:-} ]]; then local_wheels+=(--find-links "$TORCH_WHEELS"); fi
  pip install --quiet --no-deps "${local_wheels[@]}" "$TORCH" 2>/dev/null && return
  pip install --no-deps --index-url "$TORCH_INDEX" "$TORCH+cpu" && return
  fail "no build of $TORCH for $(.venv/bin/python -V): put a wheel in a folder and name it, make TORCH_WHEELS=folder,
       or name an index of CPU builds, make TORCH_INDEX=url, or another interpreter, make PYTHON=python3.11"
}

make_venv() {
  if .venv/bin/python -m pip --version >/dev/null 2>&1; then return; fi
  local python
  python=$(find_python) || fail "no Python 3.11 to 3.13 was found; name one: make PYTHON=/path/to/python"
  say "creating .venv with $("$python" -V)"
  rm -rf .venv
  "$python" -m venv .venv
}

main() {
  make_venv
  install_torch
  say "installing the packages pinned in constraints.txt"
  pip install -c constraints.txt -e '.[dev]' | on_one_line
}

main
