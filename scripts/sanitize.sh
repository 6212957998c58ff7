#!/usr/bin/env bash
# Builds the C++ tests with sanitizers and runs them. Exit code 0: no finding.
#
#   scripts/sanitize.sh [address|thread|all] [options]     default: all
#
#   address   address and undefined behaviour: attend_test, residency_test, score_test, batch_test;
#             ring_test stress, kill
#   thread    data races: batch_test; ring_test stress (kill races between processes)
#
#   --seconds N     how long each mode of ring_test runs (default 4)
#   --ring          only ring_test
#   --portable      only the portable kernels, which compile in a third of the time
#   --build-only    do not run anything
#   --build-dir D   where to build (default .cache/sanitize)
#
# Needs cmake and a compiler with the sanitizers' libraries; no Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=all seconds=4 build=.cache/sanitize tests="attend_test residency_test score_test batch_test ring_test"
build_only=0 portable=OFF
while [ $# -gt 0 ]; do
    case "$1" in
        address | thread | all) what=$1 ;;
        --ring) tests=ring_test ;;
        --portable) portable=ON ;;
        --build-only) build_only=1 ;;
        --seconds) seconds=$2 && shift ;;
        --build-dir) build=$2 && shift ;;
        *) sed -n "2,/^set /s/^# \{0,1\}//p" scripts/sanitize.sh; exit 64 ;;
    esac
    shift
done

# The first finding ends the program with a distinct exit code.
export ASAN_OPTIONS="halt_on_error=1:detect_stack_use_after_return=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:${TSAN_OPTIONS:-}"

build_for() { # sanitizer, targets
    local dir="$build/$1"
    cmake -S sgl-kernel -B "$dir" -DSCOUT_BUILD_TESTS=ON -DSCOUT_SANITIZE="$1" -DSCOUT_PORTABLE="$portable" > "$dir.log" 2>&1 \
        && cmake --build "$dir" -j "$(nproc)" --target $2 >> "$dir.log" 2>&1 \
        || { cat "$dir.log" >&2; echo "$1: the build failed" >&2; exit 1; }
}

failed=0
run() {
    [ "$build_only" = 0 ] || return 0
    echo "== $*"
    "$@" || { echo "FAILED: $*" >&2; failed=1; }
}

mkdir -p "$build"
if [ "$what" != thread ]; then
    build_for address "$tests"
    for test in $tests; do
        [ "$test" = ring_test ] || run "$build/address/$test"
    done
    run "$build/address/ring_test" all --seconds "$seconds"
fi
if [ "$what" != address ]; then
    build_for thread "${tests#*score_test }"
    case "$tests" in *batch_test*) run "$build/thread/batch_test" ;; esac
    run "$build/thread/ring_test" all --seconds "$seconds"
fi
[ "$failed" = 1 ] || [ "$build_only" = 1 ] || echo "no finding"
exit "$failed"
