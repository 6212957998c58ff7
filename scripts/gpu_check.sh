#!/usr/bin/env bash
# On a machine with a CUDA device, with or without a network, in under ten minutes a call: every kernel equals its
# reference on the device, decode steps equal a plain reference and their replayed graphs, both are timed, a server
# is checked, and kernels are clean under compute-sanitizer (where that is installed).
#
#   scripts/gpu_check.sh OUTDIR
#
# OUTDIR gets rows, each as soon as it is there and behind those of earlier calls: gpu_check.jsonl (a row per step),
# gpu_parts.jsonl (times of kernels and their shares of the bandwidth, cost of post and wait, three ways to wait,
# FlashInfer beside our kernels where it is installed; each row names its benchmark), gpu_decode.jsonl (whole decode
# steps, ours and full attention), gpu_server.jsonl (a decode server of SGLang with a small model: tokens, state, a
# killed worker) and gpu_speed.jsonl (its throughput at the shape of a large one, ours and stock). Also ops.xml (the
# tests), kernels.json (registers and shared memory), a log per step, and Triton's cache. What was skipped, for lack
# of time or of what it needs, is a row that says why. Exit status 0 if all steps that ran passed, 1 if one failed, none
# ran to its end or one was skipped that ONLY names, 2 without a CUDA device.
#
# A call runs the steps in the order of this file, until its time is over. One call is not enough for all of them:
# servers start slowly, and the measurements fill and page-lock much memory. docs/gpu.md has the calls, with ONLY,
# that give each step its time. What flashinfer, which compiles what later steps use of it, racecheck and rivals find is
# information and no failure.
#
# Variables: PYTHON (with torch, triton, numpy, msgspec, pytest, pytest-timeout and hypothesis; the .venv of this
# repository if there is one), SECONDS_LIMIT (for all of it; 570), DECODE_ARGS (options of benchmark/decode/gpu_decode.py),
# SERVER_ARGS (of benchmark/server/gpu_server.py, for both of its steps), ONLY (names of steps, others are left out), ROWS
# (another folder for the rows). A function after_step that bash exports is called after each step.
# Nothing is built and nothing is installed. Without the native module or SGLang what needs it is skipped.
set -euo pipefail

[ $# = 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 64; }
mkdir -p "$1"
OUT="$(cd "$1" && pwd)"
mkdir -p "${ROWS:=$OUT}"
ROWS="$(cd "$ROWS" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$OUT/triton-cache}"
unset TRITON_INTERPRET # the kernels shall run on the device

"$PYTHON" - "$OUT/driver" <<'PYTHON' || exit 2
import sys
from pathlib import Path

try:
    import torch
except ImportError as error:
    sys.exit(f"gpu_check: {sys.executable} has no torch ({error}); set PYTHON to one that has")
if not torch.cuda.is_available():
    sys.exit(
        f"gpu_check: no CUDA device (torch {torch.__version__}, built for CUDA {torch.version.cuda}, "
        f"{torch.cuda.device_count()} devices). This script needs one; the same kernels are tested without "
        "a device by scripts/test.sh test/ops"
    )
name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
print(f"gpu_check: {name}, compute capability {capability[0]}.{capability[1]}, torch {torch.__version__}")
sys.path.insert(0, "scripts")
import driver_library  # noqa: E402

if driver_library.link(Path(sys.argv[1])) is None:
    print("gpu_check: libcuda.so.1 is not found: what is linked with -lcuda, as FlashInfer, may not be compiled")
PYTHON
[ ! -d "$OUT/driver" ] || export LIBRARY_PATH="$OUT/driver${LIBRARY_PATH:+:$LIBRARY_PATH}"

FAILED=0 ENDED=0 SKIPPED=0
INFORMATION=""
EXCUSE="" # in the log of a step that fails: it could not run here
KNOWN=""

# row FIELDS: of a step, as JSON.
row() { printf '{"time_utc": "%s", %s}\n' "$(date -u +%FT%TZ)" "$1" >>"$ROWS/gpu_check.jsonl"; }

LIMIT_S="${SECONDS_LIMIT:-570}"
left() { echo $((LIMIT_S - SECONDS)); }

# within MOST RESERVE: what a program may be told to take of MOST seconds, or of what is left if that is less, so
# that it ends by itself.
within() { echo $((($(left) < $1 ? $(left) : $1) - $2)); }

chosen() { [ -z "${ONLY:-}" ] || case " $ONLY " in *" $1 "*) ;; *) return 1 ;; esac; }

skip() { # NAME REASON [MORE FIELDS]
    KNOWN="$KNOWN $1"
    chosen "$1" || return 0
    echo "gpu_check: $1: skipped: $2"
    row "\"step\": \"$1\", \"skipped\": \"$2\"${3:+, $3}"
    SKIPPED=$((SKIPPED + 1))
    [ -z "${ONLY:-}" ] || FAILED=1 # whoever names a step wants to know what it finds
}

# step NAME SECONDS[:LEAST] COMMAND...: runs it within that time and what is left, keeps its log, writes a row. It is
# not begun with less than LEAST seconds (10).
step() {
    local name="$1" limit_s="${2%:*}" least_s=10 status=0 begin_s=$SECONDS cut=0
    case "$2" in *:*) least_s="${2#*:}" ;; esac
    shift 2
    KNOWN="$KNOWN $name"
    chosen "$name" || return 0
    [ "$limit_s" -le "$(left)" ] || { limit_s="$(left)"; cut=1; }
    if [ "$limit_s" -lt "$least_s" ]; then
        skip "$name" "no time left: $limit_s s, of which it needs $least_s"
        return
    fi
    echo "gpu_check: $name"
    timeout -k 5 "$limit_s" "$@" >"$OUT/$name.log" 2>&1 &
    trap 'kill "$!"; exit 143' TERM INT HUP # timeout passes it on
    wait "$!" || status=$?
    trap - TERM INT HUP
    [ "$status" != 137 ] || [ $((SECONDS - begin_s)) -lt "$limit_s" ] || status=124 # it had to be killed
    tail -n 25 "$OUT/$name.log" | sed 's/^/    /'
    if [ "$status" = 124 ] && [ "$cut" = 1 ]; then # what it wrote until then stays
        skip "$name" "no time left after $limit_s s; run it alone with ONLY=$name" "\"seconds\": $limit_s"
        after_step
        return
    fi
    if [ "$status" != 0 ] && [ -n "$EXCUSE" ] && grep -qi "$EXCUSE" "$OUT/$name.log"; then
        skip "$name" "$(grep -im 1 "$EXCUSE" "$OUT/$name.log" | tr -d '"\\\t')"
        after_step
        return
    fi
    ENDED=$((ENDED + 1))
    if [ "$status" = 0 ]; then :
    elif [ -n "$INFORMATION" ]; then echo "gpu_check: $name: status $status, which is no failure; see $name.log"
    else FAILED=1; echo "gpu_check: $name FAILED with status $status"; fi
    row "\"step\": \"$name\", \"exit_status\": $status, \"seconds\": $((SECONDS - begin_s)), \"limit_s\": $limit_s${INFORMATION:+, \"information\": true}"
    after_step
}

[ "$(type -t after_step)" = function ] || after_step() { :; }

# The same for a step whose findings are to be read, but fail nothing.
information() { local INFORMATION=1; step "$@"; }

PARALLEL=()
! "$PYTHON" -c 'import xdist' 2>/dev/null || PARALLEL=(-n 8) # most of the time goes into compiling kernels

HAS_NATIVE=0
! "$PYTHON" -c 'import sglang_scout._native' 2>/dev/null || HAS_NATIVE=1
without_native() { skip "$1" "the native module is absent, so no worker could answer"; }
HAS_SGLANG=0
! "$PYTHON" -c 'from importlib.metadata import version; version("sglang"); version("sglang-scout")' 2>/dev/null ||
    HAS_SGLANG=1

HAS_FLASHINFER=0
! "$PYTHON" -c 'import flashinfer' 2>/dev/null || HAS_FLASHINFER=1
# It compiles for a minute or two, which the checks before it leave it: the step waits for it, or does it itself.
COMPILING=""
if [ "$HAS_FLASHINFER" = 1 ] && [ -n "${ONLY:-}" ] && chosen flashinfer; then
    nice timeout -k 5 "$(within 300 0)" "$PYTHON" -m benchmark.decode.full_attention >"$OUT/flashinfer-early.log" 2>&1 &
    COMPILING=$!
fi
stop_compiling() { [ -z "$COMPILING" ] || kill "$COMPILING" 2>/dev/null || true; }
trap stop_compiling EXIT

step small-sizes 120 "$PYTHON" -m benchmark.kernels.gpu_kernels --check-only
if [ "$HAS_NATIVE" = 1 ]; then step decode-check 200 "$PYTHON" -m benchmark.decode.gpu_decode --check-only
else without_native decode-check; fi
if [ "$HAS_FLASHINFER" = 1 ]; then information flashinfer 120 "$PYTHON" -m benchmark.decode.full_attention
else skip flashinfer "flashinfer is absent"; fi
stop_compiling # nothing runs beside what is measured
if [ "$HAS_NATIVE" = 1 ]; then step ring 60 "$PYTHON" -m benchmark.ring.gpu_ring --out "$ROWS/gpu_parts.jsonl"
else without_native ring; fi
step handover 40 "$PYTHON" -m benchmark.gpu_handover --out "$ROWS/gpu_parts.jsonl"
step benchmark 90 "$PYTHON" -m benchmark.kernels.gpu_kernels --out "$ROWS/gpu_parts.jsonl"
if [ "$HAS_NATIVE$HAS_SGLANG" = 11 ]; then
    # shellcheck disable=SC2086  # options, split on purpose
    step server 540:240 "$PYTHON" -m benchmark.server.gpu_server --out "$ROWS/gpu_server.jsonl" --logs "$OUT" \
        --seconds "$(within 540 20)" ${SERVER_ARGS:-}
else
    skip server "sglang, sglang-scout or the native module is absent"
fi
# 0, not unset: without the driver's usual device file the tests would choose the interpreter.
step tests 150 env TRITON_INTERPRET=0 "$PYTHON" -m pytest -q -p no:cacheprovider "${PARALLEL[@]}" test/ops -k "triton or doorbell" \
    --deselect test/ops/test_triton_compile.py --junitxml "$OUT/ops.xml"
SANITIZER="$(command -v compute-sanitizer || true)"
[ -n "$SANITIZER" ] || [ ! -x /usr/local/cuda/bin/compute-sanitizer ] || SANITIZER=/usr/local/cuda/bin/compute-sanitizer
if [ -n "$SANITIZER" ]; then
    SANITIZED=(--error-exitcode 9 "$PYTHON" -m benchmark.kernels.gpu_kernels --check-only)
    EXCUSE="Device not supported" # by this sanitizer, as devices in part of a machine are
    step memcheck 90 "$SANITIZER" --tool memcheck "${SANITIZED[@]}"
    # Hazards that it reports are to be read: it may not know how Triton waits for its asynchronous copies.
    information racecheck 90 "$SANITIZER" --tool racecheck "${SANITIZED[@]}"
    EXCUSE=""
else
    for tool in memcheck racecheck; do skip "$tool" "compute-sanitizer is not installed"; done
fi
step resources 120 "$PYTHON" scripts/compile_kernels.py --json "$OUT/kernels.json"

# shellcheck disable=SC2086  # options, split on purpose
if [ "$HAS_NATIVE" = 1 ]; then
    step decode 540:240 "$PYTHON" -m benchmark.decode.gpu_decode --out "$ROWS/gpu_decode.jsonl" \
        --skip-check --seconds "$(within 540 100)" ${DECODE_ARGS:-}
else without_native decode; fi
if [ "$HAS_NATIVE$HAS_SGLANG" = 11 ]; then
    # shellcheck disable=SC2086  # options, split on purpose
    step speed 540:240 "$PYTHON" -m benchmark.server.gpu_server --out "$ROWS/gpu_speed.jsonl" --logs "$OUT" --speed \
        --seconds "$(within 540 20)" ${SERVER_ARGS:-}
else
    skip speed "sglang, sglang-scout or the native module is absent"
fi

# Last, with the time that is left: it compiles more of FlashInfer with nvcc. Where that fails, or takes too long, a row
# says so, and what is ours has passed all the same.
if [ "$HAS_FLASHINFER" = 1 ]; then
    information rivals 180 "$PYTHON" -m benchmark.kernels.gpu_baselines --out "$ROWS/gpu_parts.jsonl"
else
    skip rivals "flashinfer is absent"
fi

for name in ${ONLY:-}; do
    case " $KNOWN " in *" $name "*) ;; *) echo "gpu_check: ONLY: there is no step $name"; FAILED=1 ;; esac
done
if [ "$ENDED" = 0 ] && [ "$FAILED" = 0 ]; then
    echo "gpu_check: no step ran to its end"
    FAILED=1
fi
[ "$FAILED" = 0 ] || echo "gpu_check: FAILED"
echo "gpu_check: $ENDED steps ran, $SKIPPED were skipped, see $OUT and the rows in $ROWS"
exit "$FAILED"
