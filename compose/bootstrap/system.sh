#!/usr/bin/env bash
# What only the system's packages can bring: a Python with venv, and RabbitMQ.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=compose/bootstrap/lib.sh
source compose/bootstrap/lib.sh

POLICY=/usr/sbin/policy-rc.d
POLICY_MARK='# lingbot: removed again when the installation ends'

missing_packages() {
  local python
  if ! python=$(find_python); then
    echo python3 python3-venv
  elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo python3-venv
  fi
  if [[ ! -e /usr/lib/rabbitmq/bin/rabbitmq-server ]] && ! command -v rabbitmq-server >/dev/null; then
    echo rabbitmq-server
  fi
}

# Debian starts a service as soon as it is installed, unless this file says no. One that is there already is the
# machine's own and stays as it is.
forbid_services() {
  [[ -e $POLICY ]] && return
  trap allow_services EXIT
  printf '#!/bin/sh\n%s\nexit 101\n' "$POLICY_MARK" | as_root tee "$POLICY" >/dev/null
  as_root chmod 755 "$POLICY"
}

allow_services() {
  if grep -qsF "$POLICY_MARK" "$POLICY"; then as_root rm -f "$POLICY"; fi
}

as_root() {
  if [[ $(id -u) -eq 0 ]]; then "$@"; else sudo "$@"; fi
}

install_packages() {
  say "installing from the system's packages: $*"
  forbid_services
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
  # The platform runs a RabbitMQ of its own; the package's service, which nobody asked for, would start at boot.
  if [[ " $* " == *" rabbitmq-server "* ]] && command -v systemctl >/dev/null; then
    as_root systemctl disable rabbitmq-server >/dev/null 2>&1 || true
  fi
}

main() {
  [[ $(uname -s) == Linux ]] || fail "this starts on Linux only; elsewhere run it in a virtual machine or a container"
  local missing
  mapfile -t missing < <(missing_packages | tr ' ' '\n')
  if [[ ${#missing[@]} -eq 0 ]]; then return; fi
  allow_services # of a run that was killed
  if ! command -v apt-get >/dev/null; then
    fail "install these with your system's package manager, then run this again: ${missing[*]}"
  fi
  if [[ $(id -u) -ne 0 ]] && ! command -v sudo >/dev/null; then
    fail "neither root nor sudo: ask for these packages to be installed, then run this again: ${missing[*]}"
  fi
  install_packages "${missing[@]}"
  find_python >/dev/null || fail "this system's Python is older than 3.11; install one and name it: make PYTHON=..."
}

main
