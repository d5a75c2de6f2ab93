#!/usr/bin/env bash
# Builds .venv from the pinned list, and installs fuse3 where this user may. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")"

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    say "needs Python 3.11 or newer: install it (Debian: apt-get install python3 python3-venv), or set PYTHON=…" >&2
    exit 1
}

need_packages=()
command -v fusermount3 >/dev/null || need_packages+=(fuse3)
"$python" -c 'import ensurepip' 2>/dev/null || need_packages+=(python3-venv)
# vLLM compiles small kernels at start: it needs a C++ compiler.
command -v g++ >/dev/null || need_packages+=(g++)
if [ ${#need_packages[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing ${need_packages[*]}"
        export DEBIAN_FRONTEND=noninteractive
        { apt-get update -q && apt-get install -y -q --no-install-recommends "${need_packages[@]}"; } >/tmp/bucket-grpo-apt.log 2>&1 \
            || say "could not install ${need_packages[*]} (see /tmp/bucket-grpo-apt.log); going on without"
    else
        say "missing: ${need_packages[*]}; as root: apt-get install ${need_packages[*]}. Going on with what works."
    fi
fi

[ -x .venv/bin/python ] || { say "creating .venv"; "$python" -m venv .venv; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

started=$SECONDS
say "installing torch (CPU build where one is offered)"
pip install -q 'torch==2.13.0'
say "installing $(wc -l <requirements/cpu.txt) pinned packages: about 2 minutes"
# --no-deps: the list is complete, and leaves out torchvision, torchaudio and torchcodec, whose builds do not match the CPU torch.
pip install -q --no-deps -r requirements/cpu.txt
pip install -q --no-deps --no-build-isolation -e .
say "ready after $((SECONDS - started)) s"
touch .venv/.ready
