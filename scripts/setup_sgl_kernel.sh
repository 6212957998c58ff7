#!/usr/bin/env bash
# A benchmark rival: the decode attention of SGLang's own CPU kernels (sglang-kernel-cpu 0.4.5), compiled from
# SGLang's source into .cache/sgl-kernel-cpu. Only benchmark/cpu_attention.py uses it; without it that benchmark
# writes a row that says so. Nothing else in this project needs it, and none of that source is in this repository.
#
#   scripts/setup_sgl_kernel.sh            clone what is needed from GitHub, compile
#   scripts/setup_sgl_kernel.sh SOURCE     from a clone of SGLang that has the commit, bare or not, or from a
#                                          folder with sgl-kernel/csrc/cpu in it, whatever its version
#
# About a minute. One file is compiled, decode.cpp, with the options of SGLang's own build. It takes the torch of
# this project's environment and needs a CPU with AVX-512 BF16; AMX is not needed.
# Variables: PYTHON (with torch; default .venv/bin/python), CXX, DEST (default .cache/sgl-kernel-cpu, where the
# benchmark looks).
set -euo pipefail
shopt -s inherit_errexit # what fails in $(...) ends the script too

HOME_OF_SOURCE=https://github.com/sgl-project/sglang
COMMIT=c00206c68c81551ce79c7c9b76c53f63a28b55ff # sets the version of the CPU kernels to 0.4.5
SOURCE=""
[ -z "${1:-}" ] || SOURCE="$(realpath -e "$1")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DEST="${DEST:-.cache/sgl-kernel-cpu}"
PYTHON="${PYTHON:-.venv/bin/python}"

say() { printf 'setup_sgl_kernel: %s\n' "$*" >&2; }
die() { printf 'setup_sgl_kernel: %s\n' "$*" >&2; exit 1; }

# Prints where the source came from.
get_source() {
    local -a parts=(sgl-kernel/csrc/cpu sgl-kernel/pyproject_cpu.toml)
    rm -rf "$DEST/source"
    mkdir -p "$DEST/source"
    if [ -z "$SOURCE" ]; then
        say "cloning $HOME_OF_SOURCE at ${COMMIT:0:12} (only the files that are needed)"
        rm -rf "$DEST/clone"
        git init -q "$DEST/clone"
        git -C "$DEST/clone" remote add origin "$HOME_OF_SOURCE"
        git -C "$DEST/clone" sparse-checkout set --no-cone "${parts[@]/#//}"
        git -C "$DEST/clone" fetch -q --depth 1 --filter=blob:none origin "$COMMIT" \
            || die "cannot clone $HOME_OF_SOURCE; give a folder that has it: scripts/setup_sgl_kernel.sh SOURCE"
        git -C "$DEST/clone" checkout -q FETCH_HEAD
        tar -C "$DEST/clone" -c "${parts[@]}" | tar -C "$DEST/source" -x
        rm -rf "$DEST/clone"
        echo "$COMMIT"
    elif git -C "$SOURCE" cat-file -e "$COMMIT:sgl-kernel/csrc/cpu/decode.cpp" 2>/dev/null; then
        git -C "$SOURCE" archive "$COMMIT" "${parts[@]}" | tar -C "$DEST/source" -x
        echo "$COMMIT"
    elif [ -f "$SOURCE/sgl-kernel/csrc/cpu/decode.cpp" ]; then
        tar -C "$SOURCE" -c "${parts[@]}" | tar -C "$DEST/source" -x
        echo "a folder, sha256 of decode.cpp $(sha256sum <"$SOURCE/sgl-kernel/csrc/cpu/decode.cpp" | cut -c1-12)"
    else
        die "$SOURCE has neither commit $COMMIT nor sgl-kernel/csrc/cpu/decode.cpp; give a clone of $HOME_OF_SOURCE"
    fi
}

[ "$(uname -m)" = x86_64 ] || die "for x86_64 only; the benchmark runs without it"
"$PYTHON" -c 'import torch' 2>/dev/null || die "$PYTHON has no torch; run scripts/setup.sh first, or set PYTHON"
mkdir -p "$DEST"
exec 9>"$DEST.lock"
flock 9
rm -f "$DEST/about.json" # the benchmark takes what is described there, and nothing half made
revision="$(get_source)"
version="$(sed -n 's/^version = "\(.*\)"/\1/p' "$DEST/source/sgl-kernel/pyproject_cpu.toml" 2>/dev/null || true)"
mapfile -t torch < <("$PYTHON" - <<'PY'
from pathlib import Path

import torch

print(Path(torch.__file__).parent)
print(torch.__version__)
print(int(torch.compiled_with_cxx11_abi()))
PY
)
say "compiling for torch ${torch[1]}"
"${CXX:-c++}" -shared -fPIC -std=c++17 -O3 -DNDEBUG -fopenmp -march=x86-64-v4 -mavx512bf16 -mavx512vnni \
    -mamx-tile -mamx-bf16 -mamx-int8 -DSGLANG_CPU_FP8_CVT_FTZ -D_GLIBCXX_USE_CXX11_ABI="${torch[2]}" \
    -Wno-unknown-pragmas -isystem "${torch[0]}/include" -isystem "${torch[0]}/include/torch/csrc/api/include" \
    benchmark/sgl_kernel_rival_binding.cpp "$DEST/source/sgl-kernel/csrc/cpu/decode.cpp" -o "$DEST/decode.so" \
    -L"${torch[0]}/lib" -Wl,-rpath,"${torch[0]}/lib" -ltorch -ltorch_cpu -lc10
printf '{"version": "%s", "revision": "%s", "torch": "%s"}\n' "${version:-unknown}" "$revision" "${torch[1]}" \
    >"$DEST/about.json"
say "done: $DEST/decode.so"
