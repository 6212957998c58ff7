"""The C++ and CUDA modules that SGLang and FlashInfer compile at first use, found or compiled before a server asks.

    python -m benchmark.server.prewarm               for the CUDA device of this machine
    python -m benchmark.server.prewarm --arch 9.0    on a machine without a device: for a bundle

SGLang compiles them one after the other, 12 to 20 s each and a minute or two for FlashInfer's attention; here they are
compiled at once. They are looked for, and left, where servers look: TVM_FFI_CACHE_DIR (SGLang; by the hash of the
sources), FlashInfer's ``data/aot``, and FLASHINFER_WORKSPACE_BASE. Prints one line. What fails is left to the server,
so the exit status is 0, except with --arch, where nobody would compile it later.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmark import rows

BF16, FP8, INT32, INT64 = "torch.bfloat16", "torch.float8_e4m3fn", "torch.int32", "torch.int64"
HEAD_DIM = 128
KV_ROW_BYTES = (2048, 1024, 512, 256)
"""K of a token in a layer: 8 KV heads of Qwen3-8B and 14B in bf16 and fp8, 2 of the small model of the checks."""
PREFILL = (INT32, HEAD_DIM, HEAD_DIM, 0, False, False, False)
"""Type of indices, both head sizes, no RoPE, window, soft cap, fp16 QK."""
ATTENTION = ("flashinfer.jit.attention", "gen_batch_prefill_module")

# What a decode server of dense Qwen3 models in bf16 builds, as (module, function, arguments), longest first.
MODULES = [
    # FlashInfer's decode wrapper with tensor cores, which SGLang chooses from 4 query heads per KV head, or for fp8.
    *((*ATTENTION, ("fa2", BF16, kv, BF16, *PREFILL)) for kv in (BF16, FP8)),
    ("sglang.jit_kernel.activation", "_jit_activation_module", (BF16,)),
    ("sglang.jit_kernel.rope", "_jit_fused_rope_module", (True, HEAD_DIM, BF16)),
    ("sglang.jit_kernel.norm", "_jit_qknorm_module", (HEAD_DIM, BF16)),
    *(("sglang.jit_kernel.kvcache", "_jit_kvcache_module", (size,)) for size in KV_ROW_BYTES),
    ("sglang.jit_kernel.clamp_position", "_jit_clamp_position_module", (INT64,)),
]


def build(name: str, function: str, arguments: Sequence[Any]) -> str:
    """Finds or compiles a module; returns why it failed, or ""."""
    values = [getattr(torch, x[6:]) if str(x).startswith("torch.") else x for x in arguments]
    try:
        made = getattr(importlib.import_module(name), function)(*values)
        if hasattr(made, "build_and_load"):  # of FlashInfer
            path = made.get_library_path()
            try:
                if path.exists():
                    made.load(path)
                    return ""
            except Exception:
                path.unlink()  # was carried here; a server would not replace it
            made.build_and_load()
    except Exception as error:
        return f"{function}{tuple(arguments)}: {type(error).__name__}: {error}"[-2000:]
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = rows.argument_parser(__doc__)
    parser.add_argument("--arch", help="compute capability, as 9.0; default: that of the device")
    arch, start = parser.parse_args(argv).arch, time.monotonic()
    if arch:  # before they are imported
        os.environ |= {"FLASHINFER_CUDA_ARCH_LIST": arch, "TVM_FFI_CUDA_ARCH_LIST": arch}
    try:
        # Only here: this process is for nothing else, and no other benchmark imports sglang.
        env, utils = map(importlib.import_module, ("flashinfer.jit.env", "sglang.jit_kernel.utils"))
    except ImportError as error:  # another SGLang
        print(f"prewarm: nothing done: {error}")
        return int(bool(arch))

    def libraries() -> set[Path]:
        cache = os.environ.get("TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi")
        folders = Path(cache).expanduser(), env.FLASHINFER_JIT_DIR
        return {path for folder in folders for path in folder.rglob("*.so")}

    for name in dict.fromkeys(name for name, _, _ in MODULES):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)  # not in threads: they import each other
    before, anywhere = libraries(), contextlib.nullcontext()
    with utils.override_jit_cuda_arch(*map(int, arch.split("."))) if arch else anywhere:
        with ThreadPoolExecutor(len(MODULES)) as pool:
            failed = [said for said in pool.map(lambda module: build(*module), MODULES) if said]
    built = len(libraries() - before)
    print(*failed, sep="\n", file=sys.stderr)
    found = f"{len(MODULES) - built - len(failed)} modules found, {built} built"
    print(f"prewarm: {found}, {len(failed)} failed, {time.monotonic() - start:.0f} s")
    return int(bool(failed) and bool(arch))


if __name__ == "__main__":
    sys.exit(main())
