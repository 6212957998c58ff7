#!/usr/bin/env bash
# Runs scripts/gpu_check.sh of a bundle; scripts/gpu_bundle.sh packs this file as run.sh.
#
#   bash run.sh RESULTS [day-1|day-2|day-3]
#
# RESULTS gets the output of gpu_check.sh. The first call unpacks and builds in ${TMPDIR:-/tmp}/scout-COMMIT-*;
# later ones start directly there, with Triton's kernels cached.
# Variables: PYTHON (with torch and Triton; python3) and those of gpu_check.sh. SECONDS_LIMIT (570) includes the preparation;
# set it 30 s below the caller's time limit.
set -euo pipefail
shopt -s nullglob

[ $# = 1 ] || [ $# = 2 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 64; }
mkdir -p "$1"
RESULTS="$(cd "$1" && pwd)"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
COMMIT="$(cat "$HERE/commit")"
WORK="${TMPDIR:-/tmp}/scout-$COMMIT-$(cksum <"$HERE/tree.tar.gz" | cut -d' ' -f1)"
export PYTHON="${PYTHON:-python3}"

# Fail in the first second, not when the first kernel fails to compile.
"$PYTHON" - "$HERE/needs" <<'PYTHON' || exit 2
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
    f"{name} {needed} is needed, there is {there(name)}"
    for name, needed in needs.items()
    if there(name).split(".")[:2] != needed.split(".")[:2]
]
if wrong:
    sys.exit(
        f"run: {sys.executable}: {'; '.join(wrong)}. Set PYTHON to another, or pack a bundle for this one "
        "(TARGET, TORCH, TRITON of scripts/gpu_bundle.sh)"
    )
PYTHON
"$PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' ||
    { echo "run: $PYTHON sees no CUDA device; set PYTHON to one that does" >&2; exit 2; }

# Unpacked by Python, as tar may lack xz; and only wheels of packages that this Python lacks.
unpack() {
    "$PYTHON" - "$HERE" "$WORK" <<'PYTHON'
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

here, work = map(Path, sys.argv[1:])
for pattern, folder in (("tree.tar.gz", "tree"), ("site.tar.*", "site")):
    (work / folder).mkdir()
    for path in here.glob(pattern):
        with tarfile.open(path) as archive:
            archive.extractall(work / folder, filter="data")
for wheel in (here / "wheels").glob("*.whl"):
    try:
        version(wheel.name.partition("-")[0])
    except PackageNotFoundError:
        print(wheel)
PYTHON
}

prepare() {
    local wheels
    rm -rf "$WORK"
    mkdir -p "$WORK"
    mapfile -t wheels < <(unpack)
    [ "${#wheels[@]}" = 0 ] || "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile \
        --target "$WORK/site" "${wheels[@]}"
    # Otherwise the first server start would compile thousands of files one by one.
    "$PYTHON" -m compileall -q -j "$(nproc)" "$WORK/site" "$WORK/tree/python" >"$WORK/compileall.log" 2>&1 || true
    touch "$WORK/ready"
}

build_native() {
    rm -rf "$WORK/built" "$WORK/tree/build" # CMake would keep the previously detected compiler
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-build-isolation --target "$WORK/built" "$WORK/tree" \
        >"$WORK/native.log" 2>&1 &&
        cp "$WORK"/built/sglang_scout/_native*.so "$WORK/tree/python/sglang_scout/" &&
        cp -r "$WORK"/built/sglang_scout-*.dist-info "$WORK/site/" # SGLang finds the plugin by its entry point
}

export PYTHONPATH="$WORK/site${PYTHONPATH:+:$PYTHONPATH}"
export BENCHMARK_COMMIT="$COMMIT" # rows name it; there is no repository here
export TRITON_CACHE_DIR="$WORK/triton" LOGS="$WORK/logs"
# SGLang compiles kernels against the toolkit it detects, wrongly if nvcc on the PATH is a symlink.
[ -n "${CUDA_HOME:-}" ] || [ ! -d /usr/local/cuda ] || export CUDA_HOME=/usr/local/cuda

[ -e "$WORK/ready" ] || prepare
native=("$WORK"/tree/python/sglang_scout/_native*.so)
if [ "${#native[@]}" = 0 ] && ! build_native; then
    echo "run: no native module (needs nanobind, scikit-build-core, cmake and a compiler); what needs it is skipped"
    tail -n 40 "$WORK/native.log"
fi
mkdir -p "$LOGS"
cp "$WORK/native.log" "$LOGS/" 2>/dev/null || true
echo "run: $WORK is ready after $SECONDS s"
export SECONDS_LIMIT=$((${SECONDS_LIMIT:-570} - SECONDS))
exec "$WORK/tree/scripts/gpu_check.sh" "$RESULTS" "${@:2}"
