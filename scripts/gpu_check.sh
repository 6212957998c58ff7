#!/usr/bin/env bash
# On a machine with a CUDA device, with or without a network, in under ten minutes: every kernel equals its
# reference on the device, decode steps equal a plain reference and their replayed graphs, both are timed, and
# kernels are clean under compute-sanitizer (where that is installed).
#
#   scripts/gpu_check.sh OUTDIR
#
# OUTDIR gets gpu_check.jsonl (a row per step), ops.xml (the tests), gpu_kernels.jsonl (times and shares of the
# bandwidth), gpu_ring.jsonl (cost of post and wait), gpu_handover.jsonl (three ways to wait), gpu_decode.jsonl
# (whole decode steps, ours and full attention), gpu_rivals.jsonl (FlashInfer beside our kernels, where it is
# installed), gpu_server.jsonl (a decode server of SGLang with a small model: tokens, state, a killed worker),
# gpu_speed.jsonl (its throughput at the shape of a large one, ours and stock), kernels.json (registers and shared
# memory), a log per step, and Triton's cache. Exit status 0 if all steps passed, 1 if one failed, 2 without a CUDA
# device. What there was no time for is a row that says so.
#
# Ten minutes are enough for all that is about being right. The measurements of whole steps and servers, which fill
# and page-lock much memory first, come last; each has ten minutes in a call of its own: ONLY=decode, then
# ONLY="speed rivals".
#
# Variables: PYTHON (with torch, triton, numpy, msgspec, pytest, pytest-timeout and hypothesis; the .venv of this
# repository if there is one), SECONDS_LIMIT (for all of it; 570), DECODE_ARGS (options of benchmark/gpu_decode.py),
# SERVER_ARGS (of benchmark/gpu_server.py), ONLY (names of steps, others are left out).
# Nothing is built and nothing is installed. Without the native module or SGLang what needs it is skipped.
set -euo pipefail

[ $# = 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 64; }
mkdir -p "$1"
OUT="$(cd "$1" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$OUT/triton-cache}"
unset TRITON_INTERPRET # the kernels shall run on the device

"$PYTHON" - <<'PYTHON' || exit 2
import sys

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
PYTHON

FAILED=0
KNOWN=""
: >"$OUT/gpu_check.jsonl"

LIMIT_S="${SECONDS_LIMIT:-570}"
left() { echo $((LIMIT_S - SECONDS)); }

# step NAME SECONDS COMMAND...: runs it within that time and what is left, keeps its log, writes a row.
step() {
    local name="$1" limit_s="$2" status=0 begin_s=$SECONDS cut=0
    shift 2
    KNOWN="$KNOWN $name"
    [ -z "${ONLY:-}" ] || case " $ONLY " in *" $name "*) ;; *) return 0 ;; esac
    [ "$limit_s" -le "$(left)" ] || { limit_s="$(left)"; cut=1; }
    if [ "$limit_s" -lt 10 ]; then
        echo "gpu_check: $name: no time left"
        printf '{"step": "%s", "skipped": "no time left"}\n' "$name" >>"$OUT/gpu_check.jsonl"
        return
    fi
    echo "gpu_check: $name"
    timeout "$limit_s" "$@" >"$OUT/$name.log" 2>&1 || status=$?
    tail -n 25 "$OUT/$name.log" | sed 's/^/    /'
    if [ "$status" = 124 ] && [ "$cut" = 1 ]; then # what it wrote until then stays
        echo "gpu_check: $name: no time left after $limit_s s; run it alone with ONLY=$name"
        printf '{"step": "%s", "skipped": "no time left", "seconds": %d}\n' "$name" "$limit_s" >>"$OUT/gpu_check.jsonl"
        return
    fi
    [ "$status" = 0 ] || { FAILED=1; echo "gpu_check: $name FAILED with status $status"; }
    printf '{"step": "%s", "exit_status": %d, "seconds": %d, "limit_s": %d}\n' \
        "$name" "$status" $((SECONDS - begin_s)) "$limit_s" >>"$OUT/gpu_check.jsonl"
}

PARALLEL=()
! "$PYTHON" -c 'import xdist' 2>/dev/null || PARALLEL=(-n 8) # most of the time goes into compiling kernels

HAS_NATIVE=0
! "$PYTHON" -c 'import sglang_scout._native' 2>/dev/null || HAS_NATIVE=1
skip() { # NAME REASON
    KNOWN="$KNOWN $1"
    [ -z "${ONLY:-}" ] || case " $ONLY " in *" $1 "*) ;; *) return 0 ;; esac
    echo "gpu_check: $1: $2: skipped"
    printf '{"step": "%s", "skipped": "%s"}\n' "$1" "$2" >>"$OUT/gpu_check.jsonl"
}
without_native() { skip "$1" "the native module is absent, so no worker could answer"; }
HAS_SGLANG=0
! "$PYTHON" -c 'from importlib.metadata import version; version("sglang"); version("sglang-scout")' 2>/dev/null ||
    HAS_SGLANG=1

step small-sizes 120 "$PYTHON" benchmark/gpu_kernels.py --check-only
step benchmark 90 "$PYTHON" benchmark/gpu_kernels.py --out "$OUT/gpu_kernels.jsonl"
if [ "$HAS_NATIVE" = 1 ]; then step decode-check 120 "$PYTHON" benchmark/gpu_decode.py --check-only
else without_native decode-check; fi
if [ "$HAS_NATIVE" = 1 ]; then step ring 60 "$PYTHON" benchmark/gpu_ring.py --out "$OUT/gpu_ring.jsonl"
else without_native ring; fi
step handover 40 "$PYTHON" benchmark/gpu_handover.py --out "$OUT/gpu_handover.jsonl"
if [ "$HAS_NATIVE$HAS_SGLANG" = 11 ]; then
    # shellcheck disable=SC2086  # options, split on purpose
    step server 230 "$PYTHON" benchmark/gpu_server.py --out "$OUT/gpu_server.jsonl" --seconds 220 \
        ${SERVER_ARGS:-}
else
    skip server "sglang, sglang-scout or the native module is absent"
fi
step tests 150 "$PYTHON" -m pytest -q -p no:cacheprovider "${PARALLEL[@]}" test/ops -k "triton or doorbell" \
    --deselect test/ops/test_triton_compile.py --junitxml "$OUT/ops.xml"
SANITIZER="$(command -v compute-sanitizer || true)"
[ -n "$SANITIZER" ] || for path in /usr/local/cuda/bin/compute-sanitizer; do
    [ ! -x "$path" ] || SANITIZER="$path"
done
if [ -n "$SANITIZER" ]; then
    for tool in memcheck racecheck; do
        step "$tool" 90 "$SANITIZER" --tool "$tool" --error-exitcode 9 \
            "$PYTHON" benchmark/gpu_kernels.py --check-only
    done
else
    for tool in memcheck racecheck; do skip "$tool" "compute-sanitizer is not installed"; done
fi
step resources 120 "$PYTHON" scripts/compile_kernels.py --json "$OUT/kernels.json"

# shellcheck disable=SC2086  # options, split on purpose
if [ "$HAS_NATIVE" = 1 ]; then
    step decode 560 "$PYTHON" benchmark/gpu_decode.py --out "$OUT/gpu_decode.jsonl" \
        --skip-check --seconds $(($(left) > 120 ? $(left) - 100 : 20)) ${DECODE_ARGS:-}
else without_native decode; fi
if [ "$HAS_NATIVE$HAS_SGLANG" = 11 ]; then
    # shellcheck disable=SC2086  # options, split on purpose
    step speed 560 "$PYTHON" benchmark/gpu_server.py --out "$OUT/gpu_speed.jsonl" --speed \
        --seconds $(($(left) > 60 ? $(left) - 20 : 40)) ${SERVER_ARGS:-}
else
    skip speed "sglang, sglang-scout or the native module is absent"
fi

# Last, with the time that is left: FlashInfer compiles with nvcc when it is first used. Where it fails, or takes too
# long, a row says so, and what is ours has passed all the same.
if "$PYTHON" -c 'import flashinfer' 2>/dev/null; then
    OURS=$FAILED
    step rivals 180 "$PYTHON" benchmark/gpu_rivals.py --out "$OUT/gpu_rivals.jsonl"
    FAILED=$OURS
else
    skip rivals "flashinfer is absent"
fi

for name in ${ONLY:-}; do
    case " $KNOWN " in *" $name "*) ;; *) echo "gpu_check: ONLY: there is no step $name"; FAILED=1 ;; esac
done
[ "$FAILED" = 0 ] && echo "gpu_check: all steps passed, see $OUT" || echo "gpu_check: FAILED, see $OUT"
exit "$FAILED"
