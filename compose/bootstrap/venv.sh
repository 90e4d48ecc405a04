#!/usr/bin/env bash
# The environment in .venv: torch first, from where it is small and without CUDA, then everything as pinned.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=compose/bootstrap/lib.sh
source compose/bootstrap/lib.sh

VENV=.venv

main() {
  make_venv
  install_torch "$(grep -i '^torch==' constraints.txt)"
  say "installing the packages pinned in constraints.txt"
  pip install -c constraints.txt -e '.[dev]' | on_one_line
}

main
