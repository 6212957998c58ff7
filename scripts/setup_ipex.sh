#!/usr/bin/env bash
# Environment of a baseline: Intel Extension for PyTorch 2.8.0 with torch 2.8.0, in .cache/ipex-venv.
# Only benchmark/kernels/cpu_attention.py uses it, in a process of its own; without it that benchmark writes a row that
# says so. Nothing else in this project needs it.
#
#   scripts/setup_ipex.sh              install what is missing
#   scripts/setup_ipex.sh --force      from scratch
#   TORCH='torch==2.8.0+cpu' UV_INDEX=<index of CPU builds of torch> scripts/setup_ipex.sh
#
# The plain torch 2.8.0 wheel for Linux is the CUDA build: it links libraries of about 4 GB that the benchmark never
# calls (uv hard-links them from its cache). The +cpu build of the second form works as well and is small, where an
# index that has it can be reached.
# Variables: PYTHON (3.9 to 3.13, default the project's own or python3), TORCH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.cache/ipex-venv
IPEX=intel-extension-for-pytorch==2.8.0
TORCH="${TORCH:-torch==2.8.0}"

say() { printf 'setup_ipex: %s\n' "$*" >&2; }
die() { printf 'setup_ipex: %s\n' "$*" >&2; exit 1; }

usable() {
    [ -x "$VENV/bin/python" ] && "$VENV/bin/python" - 2>/dev/null <<'PY'
import torch
import intel_extension_for_pytorch
assert torch.__version__.startswith("2.8.0"), torch.__version__
assert intel_extension_for_pytorch.__version__.startswith("2.8.0")
torch.ops.torch_ipex.single_query_cached_kv_attention
PY
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} .venv/bin/python python3 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "needs Python 3.9 to 3.13; set PYTHON"
}

[ "$(uname -m)" = x86_64 ] || die "the extension exists for x86_64 only; the benchmark runs without it"
case "${1:-}" in
    --force) rm -rf "$VENV" ;;
    "") ;;
    *) die "unknown argument $1; the only one is --force" ;;
esac
mkdir -p .cache
exec 9>.cache/setup_ipex.lock
flock 9
if usable; then
    say "$VENV is ready"
    exit 0
fi

python="$(find_python)"
# torch imports without triton, which only its compiler needs; the extension imports setuptools.
printf 'triton ; sys_platform == "nowhere"\n' >.cache/ipex-overrides.txt
if uv --version >/dev/null 2>&1; then
    [ -x "$VENV/bin/python" ] || uv venv -q --python "$python" "$VENV"
    say "installing $TORCH and $IPEX with uv"
    uv pip install -q --python "$VENV/bin/python" --override .cache/ipex-overrides.txt "$TORCH" "$IPEX" numpy setuptools
else
    [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV" || die "$python cannot make environments"
    say "installing $TORCH and $IPEX with pip (minutes)"
    "$VENV/bin/python" -m pip install -q "$TORCH" "$IPEX" numpy setuptools
fi
usable || die "$VENV was installed but does not import; see: $VENV/bin/python -c 'import intel_extension_for_pytorch'"
say "done: $VENV"
