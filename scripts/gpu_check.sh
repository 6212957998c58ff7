#!/usr/bin/env bash
# On a machine with a CUDA device, with or without a network: every kernel and whole decode steps equal their references,
# then kernels, ring, decode steps and servers are measured.
#
#   scripts/gpu_check.sh OUTDIR [day-1|day-2|day-3]
#
# The days are calls in the order of what matters: is it right (every kernel, whole steps, the sanitizer on the ring, a small
# model's tokens on a server with graphs, its worker killed; the ring's round trip; 390 s at most), how fast is a server beside
# stock SGLang, and what each part of a decode step costs (kernel times, ablation, launches by the profiler).
#
# OUTDIR gets rows.jsonl (each row names its benchmark; format: benchmark/rows.py), steps.jsonl (a row per step: exit
# status, or why it was skipped) and logs.tar.gz. Rows are written as soon as they are measured, behind those of earlier
# calls. Exit status 0 if all steps that ran passed, 1 if one failed, none ran, or one that ONLY names was skipped,
# 2 without a CUDA device.
#
# There is one limit of time: SECONDS_LIMIT (570) for the whole call. A step is ended after its own limit or when the call's
# time is over. Those of a day leave 30 s to unpack and build; the last one of day-2 and day-3 takes what is left. kernels-check,
# decode-check and tests, which time nothing and mostly compile kernels, run while the small model's server does.
# Variables: PYTHON (default: the .venv of this repository, or python3), SECONDS_LIMIT, ONLY (names of steps), DECODE_ARGS
# (options of benchmark/decode/gpu_decode.py), SERVER_ARGS (of benchmark/server/gpu_server.py).
set -euo pipefail

case "$#:${2:-}" in
    1:) ;;
    2:day-1) ONLY="server kernels-check decode-check ring ring-memcheck" ;;
    2:day-2) ONLY="flashinfer speed" ;;
    2:day-3) ONLY="kernels decode" ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 64 ;;
esac
mkdir -p "$1"
OUT="$(cd "$1" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
LOGS="${LOGS:-$(mktemp -d)}"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
unset TRITON_INTERPRET # the kernels shall run on the device

# FlashInfer links what it compiles with -lcuda, and images often have libcuda.so.1 alone: link the one that torch loaded.
"$PYTHON" - "$LOGS/driver" <<'PYTHON' || exit 2
import re
import sys
from pathlib import Path

try:
    import torch
except ImportError as error:
    sys.exit(f"gpu_check: {sys.executable} has no torch ({error}); set PYTHON to one that has")
if not torch.cuda.is_available():
    sys.exit(
        f"gpu_check: no CUDA device (torch {torch.__version__}, built for CUDA {torch.version.cuda}). "
        "The same kernels are tested without a device by scripts/test.sh test/ops"
    )
torch.cuda.init()
print(f"gpu_check: {torch.cuda.get_device_name()}, torch {torch.__version__}")
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
loaded = re.search(r"(/\S*/libcuda\.so[\d.]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
if loaded and not (folder / "libcuda.so").exists():
    (folder / "libcuda.so").symlink_to(loaded[1])
PYTHON
export LIBRARY_PATH="$LOGS/driver${LIBRARY_PATH:+:$LIBRARY_PATH}"

LIMIT_S="${SECONDS_LIMIT:-570}"
FAILED=0 KNOWN=""
INFORMATION=" flashinfer memcheck ring-memcheck " # may fail: what they need is not in every image

row() { printf '{"time_utc": "%s", "step": "%s", %s}\n' "$(date -u +%FT%TZ)" "$1" "$2" >>"$OUT/steps.jsonl"; }
has() { "$PYTHON" -c "$1" 2>/dev/null; }
pack_logs() { # two steps may end at once
    local part="$OUT/logs.$BASHPID"
    tar -C "$LOGS" --ignore-failed-read --warning=no-file-changed -czf "$part" . || [ "$?" = 1 ]
    mv "$part" "$OUT/logs.tar.gz"
}
end_jobs() { # timeout passes the signal on to its command
    # shellcheck disable=SC2046  # one word a process
    kill $(jobs -p) 2>/dev/null || :
    wait || :
    pack_logs
    exit 143
}
count_ended() { grep -c '"exit_status"' "$OUT/steps.jsonl" 2>/dev/null || true; }

skip() { # NAME REASON
    echo "gpu_check: $1: skipped: $2"
    row "$1" "\"skipped\": \"$2\""
    [ -z "${ONLY:-}" ] || FAILED=1 # whoever names a step wants to know what it finds
}

# step NAME SECONDS NEEDS COMMAND...: not begun where the Python line NEEDS fails, or with less than 10 s left.
step() {
    local name="$1" limit_s="$2" needs="$3" status=0 begin_s=$SECONDS left_s=$((LIMIT_S - SECONDS))
    shift 3
    KNOWN="$KNOWN $name"
    [ -z "${ONLY:-}" ] || case " $ONLY " in *" $name "*) ;; *) return 0 ;; esac
    has "$needs" || { skip "$name" "this fails: ${needs//\"/}"; return; }
    [ "$left_s" -ge 10 ] || { skip "$name" "no time left"; return; }
    [ "$limit_s" -le "$left_s" ] || limit_s="$left_s"
    echo "gpu_check: $name"
    timeout -k 5 "$limit_s" "$@" >"$LOGS/$name.log" 2>&1 &
    trap end_jobs TERM INT HUP # a subshell does not inherit it
    wait "$!" || status=$?
    tail -n 25 "$LOGS/$name.log" | sed 's/^/    /'
    row "$name" "\"exit_status\": $status, \"seconds\": $((SECONDS - begin_s)), \"limit_s\": $limit_s"
    pack_logs
    [ "$status" != 0 ] || return 0
    case "$INFORMATION" in *" $name "*) echo "gpu_check: $name: status $status, which is no failure"; return ;; esac
    # A measurement that its time cut short has left the rows that it had.
    case "$status:$name" in 124:decode | 124:speed) echo "gpu_check: $name: cut short after $limit_s s"; return ;; esac
    FAILED=1
    echo "gpu_check: $name FAILED with status $status"
}

ANY='pass'
NATIVE='import sglang_scout._native'
SERVERS='import sglang_scout._native; from importlib.metadata import version; version("sglang"); version("sglang-scout")'
ROWS="$OUT/rows.jsonl"
PARALLEL=()
! has 'import xdist' || PARALLEL=(-n 8) # most of the time goes into compiling kernels

SANITIZER='import shutil; assert shutil.which("compute-sanitizer")'
PATH="$PATH:/usr/local/cuda/bin"

BEFORE="$(count_ended)"
trap end_jobs TERM INT HUP
# shellcheck disable=SC2086  # options, split on purpose
(
    step server 260 "$SERVERS" "$PYTHON" -m benchmark.server.gpu_server --out "$ROWS" --logs "$LOGS" ${SERVER_ARGS:-}
    exit "$FAILED"
) &
SERVER=$! KNOWN=" server"
step kernels-check 100 "$ANY" "$PYTHON" -m benchmark.kernels.gpu_kernels --check-only
step decode-check 120 "$NATIVE" "$PYTHON" -m benchmark.decode.gpu_decode --check-only
# 0, not unset: without the driver's usual device file the tests would choose the interpreter.
step tests 150 "$ANY" env TRITON_INTERPRET=0 "$PYTHON" -m pytest -q -p no:cacheprovider "${PARALLEL[@]}" test/ops \
    -k "triton or doorbell" --deselect test/ops/test_triton_compile.py
wait "$SERVER" || FAILED=1
pack_logs # of two that ended at once the older may have been the last
step ring 40 "$NATIVE" "$PYTHON" -m benchmark.ring.gpu_ring --out "$ROWS"
step ring-memcheck 60 "$SANITIZER; $NATIVE" compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$PYTHON" -m benchmark.ring.gpu_ring --check-only
step flashinfer 150 'import flashinfer' "$PYTHON" -m benchmark.decode.full_attention
# shellcheck disable=SC2086
step speed "$LIMIT_S" "$SERVERS" "$PYTHON" -m benchmark.server.gpu_server --out "$ROWS" --logs "$LOGS" --speed ${SERVER_ARGS:-}
step kernels 120 "$ANY" "$PYTHON" -m benchmark.kernels.gpu_kernels --out "$ROWS"
# shellcheck disable=SC2086
step decode "$LIMIT_S" "$NATIVE" "$PYTHON" -m benchmark.decode.gpu_decode --out "$ROWS" ${DECODE_ARGS:-}
step memcheck 90 "$SANITIZER" compute-sanitizer --tool memcheck \
    --error-exitcode 9 "$PYTHON" -m benchmark.kernels.gpu_kernels --check-only

for name in ${ONLY:-}; do
    case " $KNOWN " in *" $name "*) ;; *) echo "gpu_check: ONLY: there is no step $name; there are:$KNOWN"; FAILED=1 ;; esac
done
ENDED=$(($(count_ended) - BEFORE))
[ "$ENDED" != 0 ] || { echo "gpu_check: no step ran"; FAILED=1; }
[ "$FAILED" = 0 ] || echo "gpu_check: FAILED"
echo "gpu_check: $ENDED steps ran, rows are in $OUT"
exit "$FAILED"
