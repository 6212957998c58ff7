#!/usr/bin/env bash
# Packs what a CUDA machine without a network needs for scripts/gpu_check.sh beside its own Python, torch 2.11
# and Triton 3.6: this working tree, and wheels of the packages that such an image tends to lack.
#
#   scripts/gpu_bundle.sh OUTDIR             on a machine with a network; OUTDIR must be empty or new
#   scripts/gpu_bundle.sh --kernels OUTDIR   without SGLang (scripts/gpu_site.py), so without the step "server"
#   bash OUTDIR/run.sh RESULTS               there: unpacks, builds the native module if it can, runs gpu_check.sh
#
# run.sh leaves in RESULTS the rows (*.jsonl) and, in one archive, all else: the test report, what the kernels
# compiled to, the logs. Eight files or fewer.
# Variables: PYTHON (here, with pip; python3), TARGET (the Python version there; 3.12), PLATFORM
# (manylinux_2_17_x86_64). The whole must stay below 60 MiB, or this fails. SGLang comes from the .venv of
# scripts/setup.sh.
set -euo pipefail

SERVER=1
[ "${1:-}" != --kernels ] || { SERVER=0; shift; }
[ $# = 1 ] && [ "${1#-}" = "$1" ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 64; }
PYTHON="${PYTHON:-python3}" TARGET="${TARGET:-3.12}" PLATFORM="${PLATFORM:-manylinux_2_17_x86_64}"
LIMIT_MIB=60
# Read by the tests and benchmarks of the kernels; torch brings numpy and Triton.
PACKAGES=(msgspec pyzmq psutil pytest pytest-timeout pluggy iniconfig packaging pygments hypothesis
    sortedcontainers)

die() { printf 'gpu_bundle: %s\n' "$*" >&2; exit 1; }

mkdir -p "$1"
OUT="$(cd "$1" && pwd)"
[ -z "$(ls -A "$OUT")" ] || die "$OUT is not empty; name a new folder"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$SERVER" = 1 ]; then
    [ -x .venv/bin/python ] || die "SGLang is packed from .venv: run scripts/setup.sh first, or leave it out with --kernels"
    .venv/bin/python scripts/gpu_site.py "$OUT/site.tar.xz" --target "$TARGET"
fi
mkdir "$OUT/wheels"
"$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --implementation cp --python-version "$TARGET" --platform "$PLATFORM" --platform manylinux2014_x86_64 \
    --platform manylinux_2_26_x86_64 --platform manylinux_2_28_x86_64 --dest "$OUT/wheels" "${PACKAGES[@]}" \
    || die "pip could not fetch wheels for Python $TARGET on $PLATFORM"

# Tracked files, and new ones that git does not ignore: what is checked is what lies here. Results and the accuracy
# suite's model, most of the tree's bytes, are nothing that runs there.
git ls-files -z --cached --others --exclude-standard -- . ':!docs/results' ':!benchmark/accuracy/recall_model' |
    while IFS= read -r -d '' path; do [ ! -e "$path" ] || printf '%s\0' "$path"; done |
    tar --null --files-from - --create --gzip --file "$OUT/tree.tar.gz"
git rev-parse HEAD >"$OUT/commit"

cat >"$OUT/run.sh" <<'RUN'
#!/usr/bin/env bash
# Runs scripts/gpu_check.sh of this bundle.   run.sh RESULTS   (PYTHON: with torch and Triton; python3)
# Whatever it makes lies in a temporary folder; RESULTS gets few files, which a caller can copy.
set -euo pipefail
[ $# = 1 ] || { sed -n '2s/^# //p' "$0"; exit 64; }
mkdir -p "$1"
RESULTS="$(cd "$1" && pwd)"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHON="${PYTHON:-python3}"
"$PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' ||
    { echo "run: $PYTHON sees no CUDA device, or has no torch; set PYTHON to one that does" >&2; exit 2; }
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
mkdir "$WORK/tree" "$WORK/out"
tar -xzf "$HERE/tree.tar.gz" -C "$WORK/tree"
if [ -e "$HERE/site.tar.xz" ]; then
    mkdir "$WORK/site"
    tar -xJf "$HERE/site.tar.xz" -C "$WORK/site"
fi
export PYTHONPATH="$WORK/site${PYTHONPATH:+:$PYTHONPATH}"
# SGLang compiles kernels against the toolkit that it finds: where nvcc on the PATH is a link, in the wrong place.
[ -n "${CUDA_HOME:-}" ] || [ ! -d /usr/local/cuda ] || export CUDA_HOME=/usr/local/cuda
# Only what this Python lacks: its own versions stay as they are.
for wheel in "$HERE"/wheels/*.whl; do
    name="$(basename "$wheel")"
    "$PYTHON" -m pip show --quiet "${name%%-*}" >/dev/null 2>&1 ||
        "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$WORK/site" "$wheel"
done
if "$PYTHON" -c 'import nanobind, scikit_build_core' 2>/dev/null &&
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-build-isolation --target "$WORK/built" \
        "$WORK/tree" >"$WORK/out/native.log" 2>&1; then
    cp "$WORK"/built/sglang_scout/_native*.so "$WORK/tree/python/sglang_scout/"
    mkdir -p "$WORK/site"
    cp -r "$WORK"/built/sglang_scout-*.dist-info "$WORK/site/" # by its entry point SGLang finds the plugin
    echo "run: native module built"
else
    echo "run: no native module (needs nanobind, scikit-build-core, cmake and a compiler); its tests are skipped"
fi
# All of it, this preparation included, ends within ten minutes.
export SECONDS_LIMIT="${SECONDS_LIMIT:-$((570 - SECONDS))}"
STATUS=0
"$WORK/tree/scripts/gpu_check.sh" "$WORK/out" || STATUS=$?
find "$WORK/out" -maxdepth 1 -name '*.jsonl' -exec cp {} "$RESULTS/" \;
(cd "$WORK/out" && find . -maxdepth 1 -type f ! -name '*.jsonl' -print0 | tar --null -T - -czf "$RESULTS/more.tar.gz")
exit "$STATUS"
RUN
chmod +x "$OUT/run.sh"

mib="$(du -sm "$OUT" | cut -f1)"
[ "$mib" -lt "$LIMIT_MIB" ] || die "the bundle has $mib MiB, allowed are $LIMIT_MIB"
echo "gpu_bundle: $mib MiB in $OUT: $(ls "$OUT/wheels" | wc -l) wheels for Python $TARGET, tree of $(cut -c1-12 "$OUT/commit")"
