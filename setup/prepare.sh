#!/usr/bin/env bash
# Makes a fresh Debian or Ubuntu machine ready to build and test poise: says what is missing, what
# it costs, then installs it. Costs a second when nothing is missing. The makefile runs it first.
# With the word `tests`, also what only the tests use (a browser, a small pretrained model).
#   YES=1            do not ask
#   TORCH_INDEX=URL  take the torch wheel from this index (for example a CPU-only one)
#   PYTHON=python3   the interpreter that a new .venv is made with
set -euo pipefail
cd "$(dirname "$0")/.."

torch_low=$(sed -n 's/^set(POISE_TORCH_MIN "\(.*\)").*/\1/p' cmake/torch.cmake)
torch_high=$(sed -n 's/^set(POISE_TORCH_MAX "\(.*\)").*/\1/p' cmake/torch.cmake)
base_python=${PYTHON:-python3}
package_lists=setup/packages.txt
if [ "${1:-}" = tests ]; then package_lists="$package_lists setup/packages_tests.txt"; fi

stop() { echo "[setup] $*" >&2; exit 1; }

# Debian packages that are not there. The Python ones count only where the interpreter lacks the thing.
missing_packages() {
  local package only
  while read -r package only; do  # a second word: of that system alone
    [ -z "$only" ] || grep -q "^ID=$only$" /etc/os-release || continue
    dpkg -s "$package" >/dev/null 2>&1 || echo "$package"
  done < <(cat $package_lists)
  command -v "$base_python" >/dev/null || { echo python3 python3-venv python3-dev; return; }
  "$base_python" -c 'import venv, ensurepip' 2>/dev/null || echo python3-venv
  "$base_python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || echo python3-dev
}

# The active environment, if its torch fits; else ours.
fitting_python() {
  local candidate
  for candidate in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} ${CONDA_PREFIX:+"$CONDA_PREFIX/bin/python"} python3; do
    command -v "$candidate" >/dev/null || continue
    if [ -n "$("$candidate" setup/missing.py torch "$torch_low" "$torch_high")" ]; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
}

confirm() {  # "$1": what would be done
  [ "${YES:-0}" = 1 ] && return
  local answer=
  read -r -p "$1 [y/N] " answer || stop "no answer: run it again with YES=1 to go on without asking"
  case $answer in [yY]*) ;; *) stop "nothing was done" ;; esac
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# 1. What is missing.
packages=
if command -v dpkg >/dev/null; then
  packages=$(missing_packages | tr '\n' ' ')
else
  echo "[setup] no dpkg here: make sure these are installed: $(cat $package_lists | cut -d' ' -f1 | tr '\n' ' ')"
fi
python=$(fitting_python)
torch=
wanted=any
if [ -z "$python" ]; then
  python=$PWD/.venv/bin/python
  wanted=pinned
  [ -x "$python" ] && [ -n "$("$python" setup/missing.py torch "$torch_low" "$torch_high")" ] || torch="torch==$torch_low"
elif [ "$python" = "$PWD/.venv/bin/python" ]; then
  wanted=pinned
fi
if [ -x "$python" ]; then
  requirements=$("$python" setup/missing.py requirements setup/requirements.txt $wanted | tr '\n' ' ')
  alone=$("$python" setup/missing.py requirements setup/requirements_tests.txt $wanted | tr '\n' ' ')
else
  names='s/^\([a-z][^;]*\).*/\1/p'
  requirements=$(sed -n "$names" setup/requirements.txt | sort -u -t= -k1,1 | tr '\n' ' ')
  alone=$(sed -n "$names" setup/requirements_tests.txt | tr '\n' ' ')
fi
[ "${1:-}" = tests ] || alone=
packages=${packages% } requirements=${requirements% } alone=${alone% }

# 2. What it costs.
if [ -n "$packages$torch$requirements$alone" ]; then
  echo "poise needs a few things on this machine:"
  [ -z "$packages" ] || echo "  Debian packages: $packages (up to $([ "${1:-}" = tests ] && echo 280 || echo 160) MB to download, about 1 minute)"
  if [ -n "$torch" ]; then
    if [ -n "${TORCH_INDEX:-}" ]; then
      echo "  $torch from TORCH_INDEX into .venv (0.2 GB to download for a CPU wheel, 2.5 GB for a CUDA one)"
    else
      echo "  $torch into .venv (with its CUDA libraries about 2.5 GB to download, 5 GB on disk; 2 to 10 minutes."
      echo "    TORCH_INDEX=<index of CPU wheels> makes that 0.2 GB)"
    fi
  fi
  [ -z "$requirements" ] || echo "  Python packages into $(dirname "$(dirname "$python")"): $requirements (up to 100 MB, about 1 minute)"
  [ -z "$alone" ] || echo "  for tests, without their own requirements: $alone (84 MB)"
  [ -z "$packages" ] || [ "$(id -u)" = 0 ] || echo "  as root: apt-get install -y --no-install-recommends $packages"
  [ "$(id -u)" = 0 ] || confirm "Install these now?"
fi

# 3. Install.
if [ -n "$packages" ]; then
  [ "$(id -u)" = 0 ] || command -v sudo >/dev/null || stop "not root and no sudo: run the apt-get line above as root, then this again"
  as_root apt-get update -q
  # shellcheck disable=SC2086  # a list of words
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $packages
fi
if [ -n "$torch" ]; then
  [ -x "$python" ] && "$python" -m pip --version >/dev/null 2>&1 || "$base_python" -m venv --clear .venv
  "$python" -m pip install --progress-bar off ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
  requirements=$("$python" setup/missing.py requirements setup/requirements.txt pinned | tr '\n' ' ')
fi
# shellcheck disable=SC2086
[ -z "$requirements" ] || "$python" -m pip install --progress-bar off $requirements
# shellcheck disable=SC2086
[ -z "$alone" ] || "$python" -m pip install --progress-bar off --no-deps $alone
# Ubuntu 22.04 has an older cmake than the build asks for; a pip one goes first on the PATH.
if ! PATH=$(dirname "$python"):$PATH cmake --version | "$python" -c 'import re, sys
sys.exit(tuple(map(int, re.findall(r"\d+", sys.stdin.read())[:2])) < (3, 25))'; then
  "$python" -m pip install --progress-bar off cmake==3.31.6
fi

# 4. Tell the makefile which interpreter it is, and a shell where poise is: for its own programs too.
mkdir -p build/setup/bin
printf '#!/bin/sh\nexec %q -m poise "$@"\n' "$python" > build/setup/bin/poise
chmod +x build/setup/bin/poise
{
  printf 'export POISE_SETUP_PYTHON=%q\n' "$python"
  printf 'export PATH=%q:%q:$PATH\n' "$PWD/build/setup/bin" "$(dirname "$python")"
  printf 'export PYTHONPATH=%q${PYTHONPATH:+:$PYTHONPATH}\n' "$PWD/build/cpu/python"
} > build/setup/environment
echo "set-up: ready ($python, torch $("$python" setup/missing.py torch "$torch_low" "$torch_high"))"
