#!/usr/bin/env bash
# Baselines: the decode attention of other engines on a CPU, compiled from their source into
# .cache/baseline-kernels. Only benchmark/kernels/cpu_attention.py uses them; without one it writes a row that says so. Nothing
# else in this project needs them, and none of that source is in this repository.
#
#   scripts/setup_baseline_kernels.sh                  both: clone what is needed from GitHub, compile
#   scripts/setup_baseline_kernels.sh NAME [SOURCE]    one of them: sgl-kernel (SGLang's sglang-kernel-cpu 0.4.5) or
#                                                   vllm (vLLM's CPU backend, June 2026). SOURCE: a clone that has
#                                                   the commit, bare or not, or a folder with that source in it,
#                                                   whatever its version
#
# A minute or two each. One or two files of each are compiled, with the options of the engine's own build. They take
# the torch of this project's environment and need a CPU with AVX-512 BF16; AMX is not needed.
# Variables: PYTHON (with torch; default .venv/bin/python), CXX, DEST (default .cache/baseline-kernels, where the
# benchmark looks).
set -euo pipefail
shopt -s inherit_errexit # what fails in $(...) ends the script too

say() { printf 'setup_baseline_kernels: %s\n' "$*" >&2; }
die() { printf 'setup_baseline_kernels: %s\n' "$*" >&2; exit 1; }

case "$#:${1:-}" in
    0: | [12]:[a-z]*) ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 64 ;;
esac
NAME="${1:-}"
SOURCE=""
[ -z "${2:-}" ] || SOURCE="$(realpath -e -- "$2" 2>/dev/null)" || die "there is no $2"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DEST="${DEST:-.cache/baseline-kernels}"
PYTHON="${PYTHON:-.venv/bin/python}"

AVX512=(-mavx512f -mavx512vl -mavx512bw -mavx512dq -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16)

# choose NAME: where its source is, what of it is needed (a pattern of sparse-checkout each), and how it is compiled.
choose() {
    case "$1" in
        sgl-kernel)
            HOME_OF_SOURCE=https://github.com/sgl-project/sglang
            COMMIT=c00206c68c81551ce79c7c9b76c53f63a28b55ff # sets the version of the CPU kernels to 0.4.5
            PARTS=(sgl-kernel/csrc/cpu sgl-kernel/pyproject_cpu.toml)
            FILES=(sgl-kernel/csrc/cpu/decode.cpp)
            OPTIONS=(-std=c++17 -march=x86-64-v4 "${AVX512[@]}" -mamx-int8 -DSGLANG_CPU_FP8_CVT_FTZ)
            BINDING=benchmark/kernels/sgl_kernel_binding.cpp
            ;;
        vllm)
            HOME_OF_SOURCE=https://github.com/vllm-project/vllm
            COMMIT=d2c671c29be7ffe3c4dc081c90a7ba12fd1a904e # June 2026, before 0.24
            PARTS=(csrc/cpu)
            FILES=(csrc/cpu/cpu_attn.cpp csrc/cpu/utils.cpp)
            OPTIONS=(-std=c++20 -mf16c "${AVX512[@]}" -DCPU_CAPABILITY_AMXBF16 -DVLLM_CPU_EXTENSION -DVLLM_NUMA_DISABLED)
            BINDING=benchmark/kernels/vllm_binding.cpp
            ;;
        *) die "$1 is no baseline; sgl-kernel and vllm are" ;;
    esac
    FOLDER="$DEST/$1"
}

# Prints where the source came from, and puts it into $FOLDER/new.
get_source() {
    local into="$FOLDER/new" clone="$FOLDER/clone"
    rm -rf "$into"
    mkdir -p "$into"
    if [ -z "$SOURCE" ]; then
        say "cloning $HOME_OF_SOURCE at ${COMMIT:0:12} (only the files that are needed)"
        rm -rf "$clone"
        git init -q "$clone"
        git -C "$clone" remote add origin "$HOME_OF_SOURCE"
        git -C "$clone" sparse-checkout set --no-cone "${PARTS[@]/#//}"
        git -C "$clone" fetch -q --depth 1 --filter=blob:none origin "$COMMIT" || rm -rf "$clone"
        [ -d "$clone" ] \
            || die "cannot clone $HOME_OF_SOURCE; give a folder that has it: scripts/setup_baseline_kernels.sh NAME SOURCE"
        git -C "$clone" checkout -q FETCH_HEAD
        tar -C "$clone" -c "${PARTS[@]}" | tar -C "$into" -x
        rm -rf "$clone"
        echo "$COMMIT"
    elif git -C "$SOURCE" cat-file -e "$COMMIT:${FILES[0]}" 2>/dev/null; then
        git -C "$SOURCE" archive "$COMMIT" "${PARTS[@]}" | tar -C "$into" -x
        echo "$COMMIT"
    elif [ -f "$SOURCE/${FILES[0]}" ]; then
        tar -C "$SOURCE" -c "${PARTS[@]}" | tar -C "$into" -x
        echo "a folder, sha256 of ${FILES[0]##*/} $(sha256sum <"$SOURCE/${FILES[0]}" | cut -c1-12)"
    else
        rmdir "$into"
        die "$SOURCE has neither commit $COMMIT nor ${FILES[0]}; give a clone of $HOME_OF_SOURCE"
    fi
}

# version_of NAME REVISION: prints what its rows are named by.
version_of() {
    case "$1" in
        sgl-kernel) sed -n 's/^version = "\(.*\)"/\1/p' "$FOLDER/source/sgl-kernel/pyproject_cpu.toml" 2>/dev/null || true ;;
        vllm) [ "$2" != "$COMMIT" ] || echo "${COMMIT:0:7}" ;; # its version is a tag, which is no part of its source
    esac
}

build() { # NAME
    local revision version file
    choose "$1"
    mkdir -p "$FOLDER"
    exec 9>"$FOLDER.lock"
    flock 9
    revision="$(get_source)" # what was built before stays until there is something to build
    rm -rf "$FOLDER/about.json" "$FOLDER/source" # the benchmark takes what is described there, and nothing half made
    mv "$FOLDER/new" "$FOLDER/source"
    version="$(version_of "$1" "$revision")"
    [ "$1" != vllm ] || "$PYTHON" "$FOLDER/source/csrc/cpu/generate_cpu_attn_dispatch.py"
    say "compiling $1 for torch ${TORCH[1]}"
    "${CXX:-c++}" -shared -fPIC -O3 -DNDEBUG -fopenmp "${OPTIONS[@]}" -D_GLIBCXX_USE_CXX11_ABI="${TORCH[2]}" \
        -Wno-unknown-pragmas -I"$FOLDER/source/csrc" -isystem "${TORCH[0]}/include" \
        -isystem "${TORCH[0]}/include/torch/csrc/api/include" "$BINDING" "${FILES[@]/#/$FOLDER/source/}" \
        -o "$FOLDER/attention.so" -L"${TORCH[0]}/lib" -Wl,-rpath,"${TORCH[0]}/lib" -ltorch -ltorch_cpu -lc10
    printf '{"version": "%s", "revision": "%s", "torch": "%s"}\n' "${version:-unknown}" "$revision" "${TORCH[1]}" \
        >"$FOLDER/about.json"
    say "done: $FOLDER/attention.so"
}

command -v "${CXX:-c++}" >/dev/null || die "there is no C++ compiler (${CXX:-c++}); set CXX to one"
[ "$(uname -m)" = x86_64 ] || die "for x86_64 only; the benchmark runs without them"
"$PYTHON" -c 'import torch' 2>/dev/null || die "$PYTHON has no torch; run scripts/setup.sh first, or set PYTHON"
mapfile -t TORCH < <("$PYTHON" - <<'PY'
from pathlib import Path

import torch

print(Path(torch.__file__).parent)
print(torch.__version__)
print(int(torch.compiled_with_cxx11_abi()))
PY
)
if [ -n "$NAME" ]; then build "$NAME"; else build sgl-kernel; build vllm; fi
