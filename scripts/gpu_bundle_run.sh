#!/usr/bin/env bash
# Runs scripts/gpu_check.sh of a bundle; scripts/gpu_bundle.sh packs this file as run.sh.
#
#   bash run.sh RESULTS first|figures
#
# RESULTS gets the output of gpu_check.sh. The first call unpacks in ${TMPDIR:-/tmp}/scout-COMMIT-*; later ones start
# directly there, with Triton's kernels cached. RESULTS also gets triton-cache.tar.xz: copied into this folder, it saves a
# call on another machine from compiling them again.
# Variables: PYTHON (with torch and Triton; python3) and those of gpu_check.sh. SECONDS_LIMIT (230 for first, 440 for
# figures) includes the preparation; set it 30 s below the caller's time limit.
set -euo pipefail
shopt -s nullglob

case "$#:${2:-}" in
    2:first) LIMIT_S=230 ;;
    2:figures) LIMIT_S=440 ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 64 ;;
esac
mkdir -p "$1"
RESULTS="$(cd "$1" && pwd)"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
COMMIT="$(cat "$HERE/commit")"
WORK="${TMPDIR:-/tmp}/scout-$COMMIT-$(cksum <"$HERE/tree.tar.xz" | cut -d' ' -f1)"
export PYTHON="${PYTHON:-python3}"

# What the host pages of a large model need. The memory of a virtual machine may start small and grow with use.
grep -E '^(MemTotal|MemAvailable|HugePages_Total)' /proc/meminfo | sed 's/^/run: /'
awk '/^Node/ { zone = $0 } $1 ~ /^(present|managed)$/ && $2 { print "run: " zone, $1, $2 / 256, "MiB" }' /proc/zoneinfo
SHMEM_HUGE="${SHMEM_HUGE:-/sys/kernel/mm/transparent_hugepage/shmem_enabled}"
{ echo advise >"$SHMEM_HUGE"; } 2>/dev/null || echo "run: $SHMEM_HUGE could not be set to advise"
ulimit -l unlimited 2>/dev/null || true
echo "run: huge pages for shared memory: $(cat "$SHMEM_HUGE" 2>/dev/null || true); may lock (KiB): $(ulimit -l)"

# Fail in the first seconds, not when the first kernel fails to compile.
check() {
    "$PYTHON" - "$HERE/needs" <<'PYTHON'
import importlib
import platform
import sys
from pathlib import Path


def there(name):
    try:  # not by the package's name: one that was built from source may have another
        return platform.python_version() if name == "python" else importlib.import_module(name).__version__
    except ImportError:
        return "none"


needs = dict(line.split() for line in Path(sys.argv[1]).read_text().splitlines())
wrong = [
    f"needs {name} {needed}, found {there(name)}"
    for name, needed in needs.items()
    if there(name).split(".")[:2] != needed.split(".")[:2]
]
if wrong:
    wrong = f"{'; '.join(wrong)}. Set PYTHON to another interpreter, or pack a bundle from a .venv with these versions"
else:
    import torch

    wrong = "" if torch.cuda.is_available() else "torch sees no CUDA device; set PYTHON to an interpreter whose torch does"
sys.exit(f"run: {sys.executable}: {wrong}" if wrong else 0)
PYTHON
}

# By Python, as tar may lack xz. Without bytecode the first server would compile thousands of files one by one.
prepare() {
    rm -rf "$WORK"
    mkdir -p "$WORK/tree" "$WORK/site" "$WORK/logs"
    "$PYTHON" - "$HERE" "$WORK" <<'PYTHON' &&
import os
import sys
import tarfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

here, work = map(Path, sys.argv[1:])


def unpack(path):
    folder = work / path.name.partition(".")[0].partition("-")[0]
    try:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
    except FileExistsError:  # another process made the same folder at the same moment
        unpack(path)


with ProcessPoolExecutor(os.cpu_count()) as pool:
    list(pool.map(unpack, here.glob("*.tar.xz")))
PYTHON
        { "$PYTHON" -m compileall -q -j 0 "$WORK/site" "$WORK/tree" >"$WORK/logs/compileall.log" 2>&1 || true; }
}

if [ ! -e "$WORK/ready" ]; then
    check & checked=$!
    prepare & prepared=$!
    wait "$checked" || { wait "$prepared" || true; rm -rf "$WORK"; exit 2; }
    wait "$prepared"
    touch "$WORK/ready"
fi

export PYTHONPATH="$WORK/site${PYTHONPATH:+:$PYTHONPATH}"
export BENCHMARK_COMMIT="$COMMIT" # rows name it; there is no repository here
export LOGS="$WORK/logs"
# Triton's cache has absolute paths: the same ones in each bundle, so that one call can use what another compiled.
mkdir -p "$WORK/triton"
ln -sfn "$WORK/triton" "${TMPDIR:-/tmp}/scout-triton"
export TRITON_CACHE_DIR="${TMPDIR:-/tmp}/scout-triton" TRITON_STORE_BINARY_ONLY=1
export TVM_FFI_CACHE_DIR="$WORK/site/tvm-ffi" FLASHINFER_WORKSPACE_BASE="$WORK"
# SGLang compiles kernels against the toolkit it detects, wrongly if nvcc on the PATH is a symlink.
[ -n "${CUDA_HOME:-}" ] || [ ! -d /usr/local/cuda ] || export CUDA_HOME=/usr/local/cuda

if ! PYTHONPATH="$WORK/tree/python" "$PYTHON" -c 'import sglang_scout._native' 2>"$LOGS/native.log"; then
    echo "run: no native module; steps that need it are skipped"
    tail -n 5 "$LOGS/native.log"
fi
echo "run: $WORK is ready after $SECONDS s"
export SECONDS_LIMIT=$((${SECONDS_LIMIT:-$LIMIT_S} - SECONDS))
exec "$WORK/tree/scripts/gpu_check.sh" "$RESULTS" "$2"
