#!/usr/bin/env bash
# On a machine with a CUDA device, with or without a network: is it right, and how fast is it?
#
#   scripts/gpu_check.sh OUTDIR first      at most 230 s. What the host can do; every kernel, whole decode steps and a
#                                          small model's server, with graphs and without, equal their references; the
#                                          second call at small sizes; the ring's round trip, with nothing beside it
#   scripts/gpu_check.sh OUTDIR figures    at most 440 s. Tokens per second of decode steps at 64k, 32k and 16k beside
#                                          full attention, of a server beside stock SGLang at 32k; fp8; kernels
#
# OUTDIR gets rows.jsonl (each row names its benchmark and device; format: benchmark/rows.py), steps.jsonl (a row per
# step: exit status, or why it was skipped), logs.tar.gz and, with TRITON_CACHE_DIR, triton-cache.tar.xz. Rows are
# written as soon as they are measured, behind those of earlier calls. The last thing printed is a table of this call.
# Exit status 0 if all steps passed, 1 if one failed or did not run, 2 without a CUDA device. A measurement that its time
# cut short keeps the rows that it has, and passes.
#
# Variables: SECONDS_LIMIT (230, 440), HOST_GB (host pages of the figures; the first call says what to give; 100), ONLY
# (names of steps), PYTHON (default: the .venv of this repository, or python3), REHEARSE (1: without a device, in Triton's
# interpreter, at small sizes; nothing is measured).
set -euo pipefail

case "$#:${2:-}" in
    2:first) LIMIT_S=230 ;;
    2:figures) LIMIT_S=440 ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 64 ;;
esac
LIMIT_S="${SECONDS_LIMIT:-$LIMIT_S}" HOST_GB="${HOST_GB:-100}"
mkdir -p "$1"
OUT="$(cd "$1" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
LOGS="${LOGS:-$(mktemp -d)}"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET # the kernels shall run on the device
MEASURE=(--out "$OUT/rows.jsonl") SERVER=() SCALE=1
if [ -n "${REHEARSE:-}" ]; then
    export TRITON_INTERPRET=1
    MEASURE=(--check-only) SCALE=6
    SERVER=(--device cpu)
fi

# FlashInfer links what it compiles with -lcuda, and images often have libcuda.so.1 alone: link the one that torch loaded.
[ -n "${REHEARSE:-}" ] || "$PYTHON" - "$LOGS/driver" <<'PYTHON' || exit 2
import re
import sys
from pathlib import Path

try:
    import torch
except ImportError as error:
    sys.exit(f"gpu_check: {sys.executable} has no torch ({error}); set PYTHON to an interpreter that has")
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
PATH="$PATH:/usr/local/cuda/bin"
# /proc may show less memory than there is, where a machine gets it as it uses it. Refusals would be wrong; taking it
# in steps finds out.
export SGLANG_SCOUT_HOST_MEMORY_GB="${SGLANG_SCOUT_HOST_MEMORY_GB:-$((${HOST_GB%.*} + 18))}"

SINCE="$(date -u +%FT%TZ)" FAILED=0

row() { printf '{"time_utc": "%s", "step": "%s", %s}\n' "$(date -u +%FT%TZ)" "$1" "$2" >>"$OUT/steps.jsonl"; }
pack_logs() {
    tar -C "$LOGS" --ignore-failed-read --warning=no-file-changed -czf "$OUT/logs.part" . || [ "$?" = 1 ]
    mv "$OUT/logs.part" "$OUT/logs.tar.gz"
}
table() { "$PYTHON" -m benchmark.gpu_table "$OUT" --since "$SINCE" || :; }
stop() { # timeout passes the signal on to its command
    # shellcheck disable=SC2046  # one word a process
    kill $(jobs -p) 2>/dev/null || :
    wait || :
    [ "$BASHPID" != "$$" ] || { pack_logs; table; }
    exit 143
}
trap stop TERM INT HUP

# step NAME SECONDS COMMAND...: ended after its own limit or when the call's time is over; 124 is what timeout says then.
step() {
    local name="$1" limit_s="$(($2 * SCALE))" status=0 begin_s=$SECONDS left_s=$((LIMIT_S - RESERVED_S - SECONDS))
    shift 2
    [ -z "${ONLY:-}" ] || case " $ONLY " in *" $name "*) ;; *) return 0 ;; esac
    if [ "$left_s" -lt 10 ]; then
        row "$name" '"skipped": "no time left"'
        return 1
    fi
    [ "$limit_s" -le "$left_s" ] || limit_s="$left_s"
    echo "gpu_check: $name ($SECONDS s)"
    timeout -k 20 "$limit_s" "$@" >"$LOGS/$name.log" 2>&1 &
    trap stop TERM INT HUP # a subshell does not inherit it
    wait "$!" || status=$?
    # Killed, as it took long to end.
    [ "$status" != 137 ] || [ $((SECONDS - begin_s)) -lt "$limit_s" ] || status=124
    row "$name" "\"exit_status\": $status, \"seconds\": $((SECONDS - begin_s)), \"limit_s\": $limit_s"
    [ "$status" != 0 ] || return 0
    tail -n 15 "$LOGS/$name.log" | cut -c1-300 | sed "s/^/    $name: /"
    echo "gpu_check: $name: status $status after $((SECONDS - begin_s)) s"
    [ "$status$MAY_BE_CUT" = 124yes ]
}
MAY_BE_CUT=no RESERVED_S=0

benchmark() { step "$1" "$2" "$PYTHON" -m "benchmark.$3" "${@:4}"; }

prewarm() { [ -n "${REHEARSE:-}" ] || benchmark prewarm 60 server.prewarm; }

# The checks of servers, which mostly wait for other programs, beside those of kernels and steps.
servers() {
    local failed=0
    prewarm || failed=1
    benchmark servers 110 server.gpu_server --out "$OUT/rows.jsonl" --logs "$LOGS" "${SERVER[@]}" || failed=1
    [ -n "${REHEARSE:-}" ] ||
        benchmark speed-rehearsal 110 server.gpu_server --out "$OUT/rows.jsonl" --logs "$LOGS" --rehearse || failed=1
    return "$failed"
}
kernels() {
    local share failed=0
    local -a jobs=()
    for share in 0 1 2 3; do
        benchmark "kernels-$share" 100 kernels.gpu_kernels --check-only --share "$share/4" &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job" || failed=1; done
    benchmark steps 90 decode.gpu_decode --check-only || failed=1
    benchmark rehearsal 90 decode.gpu_decode --out "$OUT/rows.jsonl" --rehearse || failed=1
    return "$failed"
}

first() {
    benchmark probe 45 host_probe --out "$OUT/rows.jsonl" || FAILED=1
    RESERVED_S=25 # for what runs alone
    servers &
    local others=$!
    kernels || FAILED=1
    wait "$others" || FAILED=1
    RESERVED_S=0
    benchmark ring 30 ring.gpu_ring "${MEASURE[@]}" || FAILED=1
    [ ! -s "$LOGS/probe.log" ] || echo "gpu_check: for the second call: HOST_GB=$(grep -E "^[0-9]+$" "$LOGS/probe.log" | tail -n 1)"
}

figures() {
    local -a decode=(decode.gpu_decode --out "$OUT/rows.jsonl" --host-gb "$HOST_GB")
    local -a server=(server.gpu_server --out "$OUT/rows.jsonl" --logs "$LOGS" --speed --host-gb "$HOST_GB")
    [ -z "${REHEARSE:-}" ] || decode+=(--rehearse)
    prewarm || FAILED=1
    MAY_BE_CUT=yes
    RESERVED_S=190 # for servers, which are the figures that matter most
    benchmark decode 230 "${decode[@]}" || FAILED=1
    RESERVED_S=0
    [ -n "${REHEARSE:-}" ] || benchmark speed 190 "${server[@]}" || FAILED=1
    benchmark kernels 45 kernels.gpu_kernels "${MEASURE[@]}" || FAILED=1
    benchmark fp8 "$LIMIT_S" "${decode[@]}" --kv fp8_e4m3 --context 65536 || FAILED=1
}

"$2"
pack_logs
for name in ${ONLY:-}; do
    grep -q "\"step\": \"$name\"" "$OUT/steps.jsonl" 2>/dev/null || { echo "gpu_check: ONLY: unknown step $name in $2"; FAILED=1; }
done
[ "$FAILED" = 0 ] || echo "gpu_check: FAILED"
table
if [ -d "${TRITON_CACHE_DIR:-}" ]; then
    tar -C "$TRITON_CACHE_DIR/" -cJf "$OUT/triton-cache.tar.xz" . || echo "gpu_check: could not pack Triton's cache"
fi
exit "$FAILED"
