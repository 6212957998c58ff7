"""SGLang's own CPU decode attention as a rival in benchmark/cpu_attention.py; scripts/setup_sgl_kernel.sh.

It reads the same pool in place: its cache is [tokens, H, D] and its tables name tokens, so page p of S tokens
is tokens p * S to p * S + S - 1.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

import awake
from attention_impls import Inputs, OverBf16

BUILT = Path(__file__).resolve().parent.parent / ".cache" / "sgl-kernel-cpu"
NAME = "sgl-kernel"  # with its version where it is there
KV_SPLITS = 8  # what SGLang's intel_amx attention backend passes


def about() -> dict[str, Any]:
    """What was built: version, revision, torch. Empty if nothing was."""
    path = BUILT / "about.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def absent_reason() -> str:
    """Why it cannot be measured, "" if it can."""
    built = about()
    if not built:
        return "no .cache/sgl-kernel-cpu; scripts/setup_sgl_kernel.sh makes it"
    if built["torch"] != torch.__version__:
        return (
            f"built for torch {built['torch']}, this is {torch.__version__}; "
            "scripts/setup_sgl_kernel.sh builds it again"
        )
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        return "needs a CPU with AVX-512 BF16"
    return ""


class SglKernel(OverBf16):
    """``decode_attention_cpu`` of sglang-kernel-cpu, called as SGLang's CPU backend calls it."""

    tolerance = 1e-2  # its output is bfloat16

    def __init__(self) -> None:
        torch.ops.load_library(BUILT / "decode.so")
        self._decode = torch.ops.scout_benchmark.sgl_kernel_decode
        self.name = f"{NAME}-{about()['version']}"

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        s = inputs.shape
        torch.set_num_threads(threads)
        q = inputs.q.bfloat16()
        k, v = (x.view(-1, s.H, s.D) for x in (inputs.k, inputs.v))
        self._out = torch.full_like(q, float("nan"))
        partial = torch.zeros(s.B, s.H * s.G, KV_SPLITS, s.D + 1)
        rows = torch.arange(s.B)
        lengths = torch.full((s.B,), s.R * s.S)
        tokens = torch.arange(s.S, dtype=torch.int32)
        tables = [
            (inputs.pages(at)[:, :, None] * s.S + tokens).view(s.B, s.R * s.S) for at in starts
        ]
        awake.openmp()
        begin_ns = time.perf_counter_ns()
        for table in tables:
            self._decode(q, k, v, self._out, partial, table, rows, lengths, s.scale, threads)
        return time.perf_counter_ns() - begin_ns

    def output(self) -> torch.Tensor:
        return self._out.float()

    def more(self, inputs: Inputs, at: int, output: torch.Tensor) -> dict[str, float | str]:
        return {"revision": str(about()["revision"])}
