#!/usr/bin/env bash
# Packs what a CUDA machine without a network needs for scripts/gpu_check.sh in addition to its own Python,
# torch 2.11 and Triton 3.6: this working tree, and wheels of the packages that such an image tends to lack.
#
#   scripts/gpu_bundle.sh OUTDIR             on a machine with a network; OUTDIR must be empty or new
#   scripts/gpu_bundle.sh --kernels OUTDIR   without SGLang, so without the steps "server" and "speed"
#   bash OUTDIR/run.sh RESULTS               there: unpacks, builds the native module if it can, runs gpu_check.sh;
#                                            see scripts/gpu_bundle_run.sh for its outputs
#
# Variables: PYTHON (here, with pip; default: python3, .venv or the one beside scripts/setup.sh's uv, whichever has pip), TARGET,
# TORCH and TRITON (the versions there, which run.sh insists on; 3.12, 2.11, 3.6), PLATFORM (manylinux_2_17_x86_64). The whole must
# stay below 60 MiB, or this fails. SGLang comes from the .venv of scripts/setup.sh.
set -euo pipefail

SERVER=1
[ "${1:-}" != --kernels ] || { SERVER=0; shift; }
[ $# = 1 ] && [ "${1#-}" = "$1" ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 64; }
TARGET="${TARGET:-3.12}" PLATFORM="${PLATFORM:-manylinux_2_17_x86_64}"
TORCH="${TORCH:-2.11}" TRITON="${TRITON:-3.6}"
LIMIT_MIB=60
# Needed by the tests and benchmarks of the kernels; torch brings numpy and Triton.
PACKAGES=(msgspec pyzmq psutil pytest pytest-timeout pluggy iniconfig packaging pygments hypothesis
    sortedcontainers)

# Imports of a server beyond the packages of a typical machine learning image; versions are those of .venv. SGLang
# needs other versions of transformers and tokenizers than such an image has. Found by importing SGLang 0.5.15.post1:
# scripts/gpu_site.py of commit 2455a25f does that for another SGLang or image.
SITE=(sglang sglang-kernel flashinfer-python transformers tokenizers pytest-timeout
    annotated-types apache-tvm-ffi cffi compressed-tensors dill distro fastapi gguf ipython
    jsonschema jsonschema-specifications loguru msgspec openai opentelemetry-api orjson
    partial-json-parser pybase64 pydantic pydantic-core python-multipart pyzmq referencing rpds-py
    setproctitle sniffio soundfile starlette traitlets typing-inspection uvicorn watchfiles)
# Parts of these that a language model server on Hopper does not load: FlashAttention-3 alone has 1.7 GB.
LEFT_OUT=(__pycache__ ./bin direct_url.json './sgl_kernel/flash_ops.*' './sgl_kernel/flashmla_ops.*'
    './sgl_kernel/spatial_ops.*' ./sgl_kernel/sm100 ./sglang/multimodal_gen ./sglang/test)

die() { printf 'gpu_bundle: %s\n' "$*" >&2; exit 1; }

# Sets PIP. An environment created by uv, like .venv, has no pip, and uv itself cannot download wheels.
find_pip() {
    local python
    local -a candidates=(python3 .venv/bin/python .cache/uv-bootstrap/bin/python)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for python in "${candidates[@]}"; do
        PIP=("$python" -m pip)
        if "${PIP[@]}" --version >/dev/null 2>&1; then return; fi
    done
    PIP=(uv tool run pip)
    [ -z "${PYTHON:-}" ] && "${PIP[@]}" --version >/dev/null 2>&1 \
        || die "no pip in ${candidates[*]}; set PYTHON to a Python that has it, or install uv"
}

mkdir -p "$1"
OUT="$(cd "$1" && pwd)"
[ -z "$(ls -A "$OUT")" ] || die "$OUT is not empty; name a new folder"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_pip
if [ "$SERVER" = 1 ]; then
    [ -x .venv/bin/python ] || die "SGLang is packed from .venv: run scripts/setup.sh first, or leave it out with --kernels"
    compgen -G ".venv/lib/python*/site-packages/torch-$TORCH.*.dist-info" >/dev/null || die "SGLang in .venv is not for torch $TORCH: run \
SGLANG_VERSION=0.5.15.post1 scripts/setup.sh first, for torch 2.11; set TORCH; or leave it out with --kernels"
    pins="$(.venv/bin/python -c '
import sys
from importlib.metadata import version
for name in sys.argv[1:]:
    print(f"{name}=={version(name)}")' "${SITE[@]}")"
    # pip tries platforms in this order, and does not order glibc versions itself.
    mapfile -t platforms < <(seq -f --platform=manylinux_2_%g_x86_64 34 -1 17)
    # shellcheck disable=SC2086  # one word a package
    "${PIP[@]}" install --quiet --no-compile --no-deps --only-binary=:all: --python-version "$TARGET" \
        "${platforms[@]}" --platform=manylinux2014_x86_64 --target "$OUT/site" $pins \
        || die "pip could not install the wheels for Python $TARGET"
    tar -C "$OUT/site" "${LEFT_OUT[@]/#/--exclude=}" -cJf "$OUT/site.tar.xz" .
    rm -rf "$OUT/site"
fi
mkdir "$OUT/wheels"
"${PIP[@]}" download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --implementation cp --python-version "$TARGET" --platform "$PLATFORM" --platform manylinux2014_x86_64 \
    --platform manylinux_2_26_x86_64 --platform manylinux_2_28_x86_64 --dest "$OUT/wheels" "${PACKAGES[@]}" \
    || die "pip could not fetch wheels for Python $TARGET on $PLATFORM"

# Tracked files, and new ones that git does not ignore: the working tree is checked as it is. Without results and the
# accuracy suite's model, most of the tree's bytes, which are not used there.
PACKED=(. ':!docs/results' ':!benchmark/accuracy/recall_model')
git ls-files -z --cached --others --exclude-standard -- "${PACKED[@]}" |
    while IFS= read -r -d '' path; do [ ! -e "$path" ] || printf '%s\0' "$path"; done |
    tar --null --files-from - --create --gzip --file "$OUT/tree.tar.gz"
# The commit recorded in rows. "-dirty": the packed tree differs from the commit.
changes="$(git status --porcelain -- "${PACKED[@]}")"
echo "$(git rev-parse HEAD)${changes:+-dirty}" >"$OUT/commit"
# Requirements on the machine, checked first by run.sh.
printf '%s\n' "python $TARGET" "torch $TORCH" "triton $TRITON" >"$OUT/needs"
cp scripts/gpu_bundle_run.sh "$OUT/run.sh"

mib="$(du -sm "$OUT" | cut -f1)"
[ "$mib" -lt "$LIMIT_MIB" ] || die "the bundle has $mib MiB, allowed are $LIMIT_MIB"
echo "gpu_bundle: $mib MiB in $OUT: $(ls "$OUT/wheels" | wc -l) wheels for Python $TARGET, tree of $(cut -c1-12 "$OUT/commit")"
