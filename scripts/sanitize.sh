#!/usr/bin/env bash
# Builds the C++ code with sanitizers and runs its tests. Exit code 0: no finding.
#
#   scripts/sanitize.sh [address|thread|all] [options]     default: all
#
#   address   address and undefined behaviour: test/ops on such a module (needs scripts/setup.sh); ring_test stress, kill
#   thread    data races: batch_test; ring_test stress (kill races between processes)
#
#   --seconds N     how long each mode of ring_test runs (default 4)
#   --ring          only ring_test
#
# Needs cmake and a compiler with the sanitizers' libraries.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=all seconds=4 build=.cache/sanitize ring_only=0
while [ $# -gt 0 ]; do
    case "$1" in
        address | thread | all) what=$1 ;;
        --ring) ring_only=1 ;;
        --seconds) seconds=$2 && shift ;;
        *) sed -n "2,/^set /s/^# \{0,1\}//p" scripts/sanitize.sh; exit 64 ;;
    esac
    shift
done

# The first finding ends the program with a distinct exit code.
export ASAN_OPTIONS="halt_on_error=1:detect_stack_use_after_return=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:${TSAN_OPTIONS:-}"

build_for() { # sanitizer
    local dir="$build/$1"
    cmake -S sgl-kernel -B "$dir" -DSCOUT_BUILD_TESTS=ON -DSCOUT_SANITIZE="$1" > "$dir.log" 2>&1 \
        && cmake --build "$dir" -j "$(nproc)" >> "$dir.log" 2>&1 \
        || { cat "$dir.log" >&2; echo "$1: the build failed" >&2; exit 1; }
}

build_module() {
    PATH="$PWD/.cache/uv-bootstrap/bin:$PATH" uv pip install -q --python .venv/bin/python --no-deps --target "$build/module" \
        --reinstall -C build-dir="$build/module-build" -C install.strip=false -C cmake.define.SCOUT_SANITIZE=address .
}

# Every tensor is a heap block, so an access beyond one is found. Python itself leaks what it keeps to its end.
test_ops() {
    LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libstdc++.so)" \
        ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0" .venv/bin/python - "$build/module" <<'PYTHON'
import importlib.util, pathlib, sys
import pytest

(file,) = pathlib.Path(sys.argv[1]).glob("sglang_scout/_native.*.so")
spec = importlib.util.spec_from_file_location("sglang_scout._native", file)
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
only = "not triton and not reference and not compile"
# -s: what a sanitizer prints as it ends the process would be captured, and lost.
sys.exit(pytest.main(["-q", "-s", "-x", "-p", "no:cacheprovider", "test/ops", "-k", only]))
PYTHON
}

failed=0
run() {
    echo "== $*"
    "$@" || { echo "FAILED: $*" >&2; failed=1; }
}

mkdir -p "$build"
if [ "$what" != thread ]; then
    [ "$ring_only" = 1 ] || { build_module; run test_ops; }
    build_for address
    run "$build/address/ring_test" all --seconds "$seconds"
fi
if [ "$what" != address ]; then
    build_for thread
    [ "$ring_only" = 1 ] || run "$build/thread/batch_test"
    run "$build/thread/ring_test" all --seconds "$seconds"
fi
[ "$failed" = 1 ] || echo "no finding"
exit "$failed"
