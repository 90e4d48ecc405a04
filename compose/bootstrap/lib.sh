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
