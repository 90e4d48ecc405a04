# shellcheck shell=bash
# Shared by the bootstrap scripts; source it. Every script may run again and does only what is missing.

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }

fail() {
  printf '\033[1;31merror:\033[0m %s\n' "$*" >&2
  exit 1
}

# Hundreds of lines as one that changes, for who watches it; errors are on stderr and stay.
on_one_line() {
  if [[ ! -t 2 ]]; then
    cat >/dev/null
    return
  fi
  local line
  while IFS= read -r line; do printf '\r\033[K    %.100s' "$line" >&2; done
  printf '\r\033[K' >&2
}

# The first interpreter this project runs on; PYTHON, where set, is the only candidate.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# --- environments: VENV names the folder of the one that is meant ---

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

make_venv() {
  if "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
  local python
  python=$(find_python) || fail "no Python 3.11 to 3.13 was found; name one: make PYTHON=/path/to/python"
  say "creating $VENV with $("$python" -V)"
  rm -rf "$VENV"
  "$python" -m venv "$VENV"
}

has_torch() {
  "$VENV/bin/python" - "$1" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
sys.exit(version("torch").split("+")[0] != sys.argv[1])
PY
}

# install_torch torch==VERSION: from a wheel on this machine (TORCH_WHEELS, or the folders pip's own settings name),
# else from the index of CPU builds. The general index holds builds with CUDA for Linux, some gigabytes of it.
install_torch() {
  has_torch "${1#torch==}" && return
  say "installing $1"
  local local_wheels=(--no-index)
  if [[ -n ${TORCH_WHEELS:-} ]]; then local_wheels+=(--find-links "$TORCH_WHEELS"); fi
  pip install --quiet --no-deps "${local_wheels[@]}" "$1" 2>/dev/null && return
  pip install --no-deps --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$1+cpu" && return
  fail "no build of $1 for $("$VENV/bin/python" -V): put a wheel in a folder and name it, make TORCH_WHEELS=folder,
       or name an index of CPU builds, make TORCH_INDEX=url, or another interpreter, make PYTHON=python3.11"
}
