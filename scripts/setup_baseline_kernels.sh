#!/usr/bin/env bash
# Baseline: the decode attention of vLLM's CPU backend, compiled from source into .cache/baseline-kernels/vllm.
# Only used by benchmark/kernels/cpu_attention.py, which reports it as absent otherwise. None of that source is in this
# repository.
#
#   scripts/setup_baseline_kernels.sh           clone what is needed from GitHub, compile
#   scripts/setup_baseline_kernels.sh SOURCE    from a clone that has the commit, bare or not
#
# Takes a minute or two: two files are compiled, with the options of vLLM's own build. Uses the torch of this project's
# environment and needs a CPU with AVX-512 BF16; AMX is not needed.
# Variables: PYTHON (with torch; default .venv/bin/python), CXX.
set -euo pipefail
shopt -s inherit_errexit # failures in $(...) also end the script

say() { printf 'setup_baseline_kernels: %s\n' "$*" >&2; }
die() { printf 'setup_baseline_kernels: %s\n' "$*" >&2; exit 1; }

case "$#:${1:-}" in
    0: | 1:[!-]*) ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 64 ;;
esac
SOURCE=""
[ -z "${1:-}" ] || SOURCE="$(realpath -e -- "$1" 2>/dev/null)" || die "$1 does not exist"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DEST=.cache/baseline-kernels/vllm
PYTHON="${PYTHON:-.venv/bin/python}"
ORIGIN=https://github.com/vllm-project/vllm
COMMIT=d2c671c29be7ffe3c4dc081c90a7ba12fd1a904e # June 2026, before 0.24
OPTIONS=(-std=c++20 -mavx512f -mavx512vl -mavx512bw -mavx512dq -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mf16c
    -DCPU_CAPABILITY_AMXBF16 -DVLLM_CPU_EXTENSION -DVLLM_NUMA_DISABLED)

command -v "${CXX:-c++}" >/dev/null || die "there is no C++ compiler (${CXX:-c++}); set CXX to one"
[ "$(uname -m)" = x86_64 ] || die "vLLM's kernels need x86_64; the benchmark runs without them"
"$PYTHON" -c 'import torch' 2>/dev/null || die "$PYTHON has no torch; run scripts/setup.sh first, or set PYTHON"
mapfile -t TORCH < <("$PYTHON" - <<'PY'
from pathlib import Path

import torch

print(Path(torch.__file__).parent)
print(torch.__version__)
print(int(torch.compiled_with_cxx11_abi()))
PY
)
mkdir -p "$DEST"
exec 9>"$DEST.lock"
flock 9
rm -rf "$DEST/about.json" "$DEST/source" "$DEST/clone" # the benchmark uses what about.json describes, never a partial build
mkdir "$DEST/source"
if [ -z "$SOURCE" ]; then
    say "cloning $ORIGIN at ${COMMIT:0:12} (only the files that are needed)"
    SOURCE="$DEST/clone"
    git init -q "$SOURCE"
    git -C "$SOURCE" remote add origin "$ORIGIN"
    git -C "$SOURCE" sparse-checkout set --no-cone /csrc/cpu
    git -C "$SOURCE" fetch -q --depth 1 --filter=blob:none origin "$COMMIT" || die "cannot clone $ORIGIN; give the path of a clone"
    git -C "$SOURCE" checkout -q FETCH_HEAD
fi
git -C "$SOURCE" archive "$COMMIT" csrc/cpu | tar -C "$DEST/source" -x
"$PYTHON" "$DEST/source/csrc/cpu/generate_cpu_attn_dispatch.py"
say "compiling for torch ${TORCH[1]}"
"${CXX:-c++}" -shared -fPIC -O3 -DNDEBUG -fopenmp "${OPTIONS[@]}" -D_GLIBCXX_USE_CXX11_ABI="${TORCH[2]}" \
    -Wno-unknown-pragmas -I"$DEST/source/csrc" -isystem "${TORCH[0]}/include" \
    -isystem "${TORCH[0]}/include/torch/csrc/api/include" benchmark/kernels/vllm_binding.cpp \
    "$DEST/source/csrc/cpu/cpu_attn.cpp" "$DEST/source/csrc/cpu/utils.cpp" \
    -o "$DEST/attention.so" -L"${TORCH[0]}/lib" -Wl,-rpath,"${TORCH[0]}/lib" -ltorch -ltorch_cpu -lc10
printf '{"version": "%s", "torch": "%s"}\n' "${COMMIT:0:7}" "${TORCH[1]}" >"$DEST/about.json"
say "done: $DEST/attention.so"
