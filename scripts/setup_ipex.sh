#!/usr/bin/env bash
# Baseline environment: Intel Extension for PyTorch 2.8.0 with torch 2.8.0, in .cache/ipex-venv.
# Only used by benchmark/kernels/cpu_attention.py, in a separate process; that benchmark reports it as absent
# otherwise. Nothing else in this project needs it.
#
#   scripts/setup_ipex.sh
#   TORCH='torch==2.8.0+cpu' UV_INDEX=<index of CPU builds of torch> scripts/setup_ipex.sh
#
# The default torch 2.8.0 wheel for Linux is the CUDA build: it depends on about 4 GB of libraries that the benchmark
# never calls. The +cpu build of the second form also works and is small, if an index that has it is reachable.
# Variables: PYTHON (3.9 to 3.13, default the project's own), TORCH. To start over, remove .cache/ipex-venv.
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
    # Without triton, which only torch.compile needs.
    printf 'triton ; sys_platform == "nowhere"\n' >.cache/ipex-overrides.txt
    uv venv -q --clear --python "$PYTHON" "$VENV"
    uv pip install -q --python "$VENV/bin/python" --override .cache/ipex-overrides.txt "${PACKAGES[@]}"
else
    "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -m pip install -q "${PACKAGES[@]}"
fi
usable || { say "$VENV cannot import the extension; to see why: $VENV/bin/python -c 'import intel_extension_for_pytorch'"; exit 1; }
say "done: $VENV"
