#!/usr/bin/env bash
# Packs what a machine with a Hopper GPU and no network needs for scripts/gpu_check.sh beyond its own Python, torch and
# Triton: this working tree, SGLang and the packages that such an image tends to lack, the native module, and the
# modules that SGLang and FlashInfer would compile there at first use.
#
#   scripts/gpu_bundle.sh OUTDIR                    OUTDIR must be empty or new
#   bash OUTDIR/run.sh RESULTS first|figures        there; see scripts/gpu_bundle_run.sh
#
# All comes from .venv, which must have the Python of that machine and an SGLang for its torch:
# PYTHON=python3.12 SGLANG_VERSION=0.5.15.post1 scripts/setup.sh. run.sh insists on the same versions. The modules need
# nvcc (CUDA_HOME or /usr/local/cuda) and some minutes the first time; without nvcc they are compiled there.
set -euo pipefail

# The bundle, and the bundle with the tracked files: a checkout that carries a bundle travels with both.
LIMIT_MIB=48 TOGETHER_MIB=62
PARTS=12 # archives, unpacked in parallel
ARCH=9.0
# Imports of a server beyond the packages of a typical machine learning image. SGLang needs other versions of
# transformers and tokenizers than such an image has.
SITE=(sglang sglang-kernel flashinfer-python transformers tokenizers
    annotated-types apache-tvm-ffi cffi compressed-tensors dill distro fastapi gguf ipython
    jaxtyping jsonschema jsonschema-specifications loguru msgspec openai opentelemetry-api orjson
    partial-json-parser pybase64 pydantic pydantic-core python-multipart pyzmq referencing rpds-py
    setproctitle sniffio soundfile starlette traitlets typing-inspection uvicorn wadler-lindig
    watchfiles)
# Parts of these that a language model server on Hopper does not load, nor its modules need: FlashAttention-3 alone has 1.7 GB.
LEFT_OUT='(^|/)__pycache__/|^\.\.|direct_url\.json$|^sgl_kernel/(flash_ops|flashmla_ops|spatial_ops|sm100)'
LEFT_OUT="$LEFT_OUT|^flashinfer/data/cutlass/|^sglang/(multimodal_gen|test|jit_kernel/(tests|benchmark))/"

die() { printf 'gpu_bundle: %s\n' "$*" >&2; exit 1; }

[ $# = 1 ] && [ "${1#-}" = "$1" ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 64; }
mkdir -p "$1"
OUT="$(cd "$1" && pwd)"
[ -z "$(ls -A "$OUT")" ] || die "$OUT is not empty; name a new folder"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="$PWD/.venv/bin/python"
compgen -G ".venv/lib/python*/site-packages/sglang-0.5.15*.dist-info" >/dev/null ||
    die ".venv must have SGLang 0.5.15.post1, the release for torch 2.11: run SGLANG_VERSION=0.5.15.post1 scripts/setup.sh first"

# -- modules compiled for the GPU, kept from bundle to bundle ------------------------------------------------

JIT="$PWD/.cache/gpu-jit"
export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}" TVM_FFI_CACHE_DIR="$JIT/tvm-ffi" FLASHINFER_WORKSPACE_BASE="$JIT"
mkdir -p "$TVM_FFI_CACHE_DIR"
if [ -x "$CUDA_HOME/bin/nvcc" ]; then
    stub="$(echo "$PWD"/.venv/lib/python*/site-packages/sglang_scout/no_driver)"
    ln -sf "$stub/libcuda.so.1" "$JIT/libcuda.so" # FlashInfer links with the driver's library
    (
        . scripts/cpu_env.sh
        export LIBRARY_PATH="$JIT" LD_LIBRARY_PATH="$stub"
        "$PYTHON" -m benchmark.server.prewarm --arch "$ARCH"
    ) || die "SGLang's modules could not be compiled"
else
    echo "gpu_bundle: no nvcc in $CUDA_HOME: SGLang's modules will be compiled on the GPU machine, which takes a minute or two"
fi

# -- the packages --------------------------------------------------------------------------------------------

mkdir "$OUT/site"
"$PYTHON" - "$OUT/site" "$JIT" "$LEFT_OUT" "${SITE[@]}" <<'PYTHON'
import re
import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

site, jit, left_out = Path(sys.argv[1]), Path(sys.argv[2]), re.compile(sys.argv[3])


def put(source, path):
    (site / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, site / path)


for name in (*sys.argv[4:], "sglang-scout"):
    for file in distribution(name).files:
        if not left_out.search(str(file)) and not file.name.startswith("_editable"):
            put(file.locate(), file)
for path in jit.glob("tvm-ffi/*/*.so"):
    put(path, Path("tvm-ffi") / path.relative_to(jit / "tvm-ffi"))
for path in jit.glob(".cache/flashinfer/*/*/cached_ops/*/*.so"):
    put(path, Path("flashinfer/data/aot", path.stem, path.name))
PYTHON
# With our backend SGLang imports DeepSeek's sparse attention, and that cutlass (190 MB), which no model here runs.
sed -i 's/^_is_cuda = is_cuda()$/_is_cuda = False/' "$OUT/site/sglang/jit_kernel/dsa/__init__.py"
grep -q '^_is_cuda = False' "$OUT/site/sglang/jit_kernel/dsa/__init__.py" || die "the import of cutlass is elsewhere in this SGLang"
find "$OUT/site" -regex '.*/\(aot\|tvm-ffi\|sglang_scout\)/.*\.so' -exec strip {} +
tar -C "$OUT/site" --transform 's,^,python/,' -cJf "$OUT/tree-native.tar.xz" sglang_scout
rm -r "$OUT/site/sglang_scout"
# Parts of equal size, largest files first.
(cd "$OUT/site" && find . -type f -printf '%s %p\n') | sort -rn | awk -v out="$OUT" -v parts="$PARTS" '{
    least = 0
    for (i = 1; i < parts; i++) if (bytes[i] < bytes[least]) least = i
    bytes[least] += $1 + 4096
    print substr($0, length($1) + 2) > (out "/part-" least)
}'
seq 0 $((PARTS - 1)) | xargs -P "$(nproc)" -I@ tar -C "$OUT/site" --files-from "$OUT/part-@" -cJf "$OUT/site-@.tar.xz"
rm -rf "$OUT/site" "$OUT"/part-*

# -- the tree ------------------------------------------------------------------------------------------------

# Tracked files, and new ones that git does not ignore: the working tree is checked as it is. Without results and the
# accuracy suite's model, most of the tree's bytes, which are not used there.
PACKED=(. ':!docs/results' ':!benchmark/accuracy/recall_model')
git ls-files -z --cached --others --exclude-standard -- "${PACKED[@]}" |
    while IFS= read -r -d '' path; do [ ! -e "$path" ] || printf '%s\0' "$path"; done |
    tar --null --files-from - -cJf "$OUT/tree.tar.xz"
# The commit recorded in rows. "-dirty": the packed tree differs from the commit.
changes="$(git status --porcelain -- "${PACKED[@]}")"
echo "$(git rev-parse HEAD)${changes:+-dirty}" >"$OUT/commit"
# Requirements on the machine, checked first by run.sh.
"$PYTHON" -c 'import platform, torch, triton
for name, there in ("python", platform.python_version()), ("torch", torch.__version__), ("triton", triton.__version__):
    print(name, ".".join(there.split(".")[:2]))' >"$OUT/needs"
cp scripts/gpu_bundle_run.sh "$OUT/run.sh"

mib="$(du -sm --apparent-size "$OUT" | cut -f1)"
tracked="$(git ls-files -z | du -cm --apparent-size --files0-from - | tail -1 | cut -f1)"
[ "$mib" -le "$LIMIT_MIB" ] || die "the bundle has $mib MiB; at most $LIMIT_MIB are allowed"
[ $((mib + tracked)) -le "$TOGETHER_MIB" ] ||
    die "the bundle has $mib MiB and the tracked files $tracked; together at most $TOGETHER_MIB are allowed"
echo "gpu_bundle: $mib MiB in $OUT, tree of $(cut -c1-12 "$OUT/commit")"
