#!/usr/bin/env bash
# Runs scripts/gpu_check.sh of a bundle, in which scripts/gpu_bundle.sh puts this file as run.sh.
#
#   bash run.sh RESULTS
#
# RESULTS gets seven files at most, which a caller can copy: the rows (*.jsonl), each as soon as it is there, and in
# more.tar.gz the logs of all calls so far, made anew after each step. Nothing in RESULTS is ever removed: rows are
# written behind those of earlier calls. What is made on the way stays in ${TMPDIR:-/tmp} for the next call:
# scout-work-COMMIT, tree, packages and native module, made anew where bundle or Python are others, or it was cut
# short; and scout-kept, logs and the kernels that Triton has compiled, which stay in any case.
# Variables: PYTHON (with torch and Triton; python3), and those of gpu_check.sh. Where whoever calls ends a call, or
# takes the machine back, after some time, SECONDS_LIMIT should be 40 s less than that.
set -euo pipefail
shopt -s nullglob

[ $# = 1 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 64; }
mkdir -p "$1"
RESULTS="$(cd "$1" && pwd)"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
COMMIT="$(cat "$HERE/commit")"
WORK="${TMPDIR:-/tmp}/scout-work-$COMMIT"
KEPT="${TMPDIR:-/tmp}/scout-kept"
export PYTHON="${PYTHON:-python3}"

# In the first second, not when the first kernel fails to compile.
"$PYTHON" - "$HERE/needs" <<'PYTHON' || exit 2
import importlib
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def there(name):
    if name == "python":
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:  # one that was built from source may have another name
        try:
            return importlib.import_module(name).__version__
        except ImportError:
            return "none"


wrong = []
for line in Path(sys.argv[1]).read_text().splitlines():
    name, needed = line.split()
    if there(name).split(".")[:2] != needed.split(".")[:2]:
        wrong.append(f"{name} {needed} is needed, there is {there(name)}")
if wrong:
    sys.exit(
        f"run: {sys.executable}: {'; '.join(wrong)}. Set PYTHON to another, or pack a bundle for this one "
        "(TARGET, TORCH, TRITON of scripts/gpu_bundle.sh)"
    )
PYTHON
ABOUT="$("$PYTHON" -c 'import sys, torch
from importlib.util import find_spec
print(sys.executable, sys.version.split()[0], torch.__version__)
print(*(name for name in ("nanobind", "scikit_build_core") if find_spec(name)))
raise SystemExit(not torch.cuda.is_available())')" ||
    { echo "run: $PYTHON sees no CUDA device, or has no torch; set PYTHON to one that does" >&2; exit 2; }
ABOUT="$ABOUT
$(cd "$HERE" && cat tree.tar.gz site.tar.* wheels/*.whl | sha256sum)"

export PYTHONPATH="$WORK/site${PYTHONPATH:+:$PYTHONPATH}"
export BENCHMARK_COMMIT="$COMMIT" # rows name it; there is no repository here
export TRITON_CACHE_DIR="$KEPT/triton"
# SGLang compiles kernels against the toolkit that it finds: where nvcc on the PATH is a link, in the wrong place.
[ -n "${CUDA_HOME:-}" ] || [ ! -d /usr/local/cuda ] || export CUDA_HOME=/usr/local/cuda

# unpack ARCHIVE FOLDER: by Python, which has xz where the image does not.
unpack() {
    "$PYTHON" -c 'import sys, tarfile
with tarfile.open(sys.argv[1]) as archive:
    archive.extractall(sys.argv[2], filter="data")' "$1" "$2"
}

# Those wheels whose packages this Python lacks: its own versions stay as they are.
absent_wheels() {
    "$PYTHON" - "$@" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

for wheel in sys.argv[1:]:
    try:
        version(Path(wheel).name.partition("-")[0])
    except PackageNotFoundError:
        print(wheel)
PY
}

# Returns 1 if the next call should try again.
build_native() {
    rm -rf "$WORK/built" "$WORK/tree/build" # CMake would go on with the compiler that it found first
    if ! "$PYTHON" -c 'import nanobind, scikit_build_core' 2>/dev/null; then
        echo "run: nanobind or scikit-build-core is absent" >"$WORK/native.log"
        return 0
    fi
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-build-isolation --target "$WORK/built" \
        "$WORK/tree" >"$WORK/native.log" 2>&1 &&
        cp "$WORK"/built/sglang_scout/_native*.so "$WORK/tree/python/sglang_scout/" &&
        cp -r "$WORK"/built/sglang_scout-*.dist-info "$WORK/site/" # by its entry point SGLang finds the plugin
}

prepare() {
    local site wheels
    rm -rf "$WORK"
    mkdir -p "$WORK/tree" "$WORK/site"
    unpack "$HERE/tree.tar.gz" "$WORK/tree"
    for site in "$HERE"/site.tar.*; do unpack "$site" "$WORK/site"; done
    wheels=("$HERE"/wheels/*.whl)
    mapfile -t wheels < <(absent_wheels "${wheels[@]}")
    [ "${#wheels[@]}" = 0 ] || "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile \
        --target "$WORK/site" "${wheels[@]}"
    # A server that starts would compile thousands of files one by one.
    "$PYTHON" -m compileall -q -j "$(nproc)" "$WORK/site" "$WORK/tree/python" >"$WORK/compileall.log" 2>&1 || true
    printf '%s\n' "$ABOUT" >"$WORK/ready"
}

if [ "$(cat "$WORK/ready" 2>/dev/null || true)" = "$ABOUT" ]; then
    echo "run: $WORK is ready"
else
    prepare
    echo "run: $WORK made in $SECONDS s"
fi
# By itself, so that a call after one that could not build it makes nothing else anew.
if [ ! -e "$WORK/native-done" ]; then
    ! build_native || touch "$WORK/native-done"
    echo "run: native module tried, $SECONDS s after the begin"
fi
LOGS="$KEPT/logs/$(date -u +%FT%H%M%SZ)"
mkdir -p "$LOGS"
cp "$WORK/native.log" "$LOGS/"
native=("$WORK"/tree/python/sglang_scout/_native*.so)
if [ "${#native[@]}" = 0 ]; then
    echo "run: no native module (needs nanobind, scikit-build-core, cmake and a compiler); what needs it is skipped"
    tail -n 40 "$WORK/native.log"
    for name in ${ONLY:-}; do
        case "$name" in decode-check | ring | server | decode | speed)
            echo "run: FAILED: ONLY names $name, which needs the native module" >&2
            exit 1 ;;
        esac
    done
fi

export SECONDS_LIMIT=$((${SECONDS_LIMIT:-570} - SECONDS)) # is for all of it, this preparation included
export ROWS="$RESULTS" KEPT
after_step() { tar -C "$KEPT/logs" -czf "$ROWS/more.tar.gz.part" . && mv "$ROWS/more.tar.gz.part" "$ROWS/more.tar.gz"; }
export -f after_step
STATUS=0
"$WORK/tree/scripts/gpu_check.sh" "$LOGS" &
trap 'kill "$!" || true; wait "$!" || true; after_step; exit 143' TERM INT HUP
wait "$!" || STATUS=$?
after_step
exit "$STATUS"
