#!/usr/bin/env bash
# Environment of a baseline: Intel Extension for PyTorch 2.8.0 with torch 2.8.0, in .cache/ipex-venv.
# Only benchmark/kernels/cpu_attention.py uses it, in a process of its own; without it that benchmark writes a row that
# says so. Nothing else in this project needs it.
#
#   scripts/setup_ipex.sh
#   TORCH='torch==2.8.0+cpu' UV_INDEX=<index of CPU builds of torch> scripts/setup_ipex.sh
#
# The plain torch 2.8.0 wheel for Linux is the CUDA build: it links libraries of about 4 GB that the benchmark never
# calls. The +cpu build of the second form works as well and is small, where an index that has it can be reached.
# Variables: PYTHON (3.9 to 3.13, default the project's own), TORCH. To begin anew remove .cache/ipex-venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.cache/ipex-venv
PYTHON="${PYTHON:-.venv/bin/python}"
PACKAGES=("${TORCH:-torch==2.8.0}" intel-extension-for-pytorch==2.8.0 numpy setuptools)

usable() {
    "$VENV/bin/python" - 2>/dev/null <<'PY'
import torch
import intel_extension_for_pytorch
torch.ops.torch_ipex.single_query_cached_kv_attention
PY
}

say() { printf 'setup_ipex: %s\n' "$*" >&2; }

[ "$(uname -m)" = x86_64 ] || { say "the extension exists for x86_64 only; the benchmark runs without it"; exit 1; }
mkdir -p .cache
exec 9>.cache/setup_ipex.lock
flock 9
if usable; then say "$VENV is ready"; exit 0; fi
say "installing ${PACKAGES[*]}"
if uv --version >/dev/null 2>&1; then
    # torch imports without triton, which only its compiler needs.
    printf 'triton ; sys_platform == "nowhere"\n' >.cache/ipex-overrides.txt
    uv venv -q --clear --python "$PYTHON" "$VENV"
    uv pip install -q --python "$VENV/bin/python" --override .cache/ipex-overrides.txt "${PACKAGES[@]}"
else
    "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -m pip install -q "${PACKAGES[@]}"
fi
usable || { say "$VENV does not import; see: $VENV/bin/python -c 'import intel_extension_for_pytorch'"; exit 1; }
say "done: $VENV"
