"""CPU decode attention of other engines, baselines of cpu_attention.py; built by scripts/setup_baseline_kernels.sh.

They read the same pool in place, each as it lays out its cache:
    sgl-kernel  [tokens, H, D] and tables of tokens: page p of S tokens is tokens p * S to p * S + S - 1
    vllm        blocks of 128 tokens, what it takes on a CPU unless it is told otherwise: of a head K [D, 128], then V
                [128, D]. The same bytes with another meaning, so another reference
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmark.kernels import awake
from benchmark.kernels.implementations import Inputs, OverBf16, Shape, reference_bf16
from benchmark.kernels.kv_pool import PageStream

BUILT = Path(__file__).resolve().parents[2] / ".cache" / "baseline-kernels"
KV_SPLITS = 8  # what SGLang's intel_amx attention backend passes
VLLM_BLOCK = 128  # tokens
VLLM_ISA = "vec"  # what vLLM takes for such blocks where a CPU has no AMX


def about(name: str) -> dict[str, Any]:
    """What was built: version, revision, torch. Empty if nothing was."""
    path = BUILT / name / "about.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def absent_reason(name: str) -> str:
    """Why it cannot be measured, "" if it can."""
    built = about(name)
    if not built:
        return (
            f"no .cache/baseline-kernels/{name}; scripts/setup_baseline_kernels.sh {name} makes it"
        )
    if built["torch"] != torch.__version__:
        return (
            f"built for torch {built['torch']}, this is {torch.__version__}; "
            f"scripts/setup_baseline_kernels.sh {name} builds it again"
        )
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        return "needs a CPU with AVX-512 BF16"
    return ""


class Compiled(OverBf16):
    """``NAME``: of its folder in BUILT, and with the version of what was built there that of its rows."""

    NAME: str
    tolerance = 1e-2  # its output is bfloat16

    def __init__(self) -> None:
        torch.ops.load_library(BUILT / self.NAME / "attention.so")
        self._about = about(self.NAME)
        self.name = f"{self.NAME}-{self._about['version']}"

    def output(self) -> torch.Tensor:
        return self._out.float()

    def _begin(self, inputs: Inputs, threads: int) -> torch.Tensor:
        """The query as it takes it, and room for its output."""
        torch.set_num_threads(threads)
        q = inputs.q.bfloat16()
        self._out = torch.full_like(q, float("nan"))
        return q


class SglKernel(Compiled):
    """``decode_attention_cpu`` of sglang-kernel-cpu, called as SGLang's CPU backend calls it."""

    NAME = "sgl-kernel"

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        s, q = inputs.shape, self._begin(inputs, threads)
        decode = torch.ops.scout_benchmark_sgl_kernel.decode
        k, v = (x.view(-1, s.H, s.D) for x in (inputs.k, inputs.v))
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
            decode(q, k, v, self._out, partial, table, rows, lengths, s.scale, threads)
        return time.perf_counter_ns() - begin_ns


class Vllm(Compiled):
    """``cpu_attention_with_kv_cache`` of vLLM, with a plan of the work that is made before the clock starts: vLLM makes
    one a step, for all layers."""

    NAME = "vllm"
    layout = "blocks of vLLM"

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[Shape, PageStream] = {}

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        s, q = inputs.shape, self._begin(inputs, threads)
        ops = torch.ops.scout_benchmark_vllm
        k, v = self._cache(inputs)
        query_starts = torch.arange(s.B + 1, dtype=torch.int32)
        lengths = torch.full((s.B,), s.R * s.S, dtype=torch.int32)
        tables = [self._blocks(inputs, at) for at in starts]
        plans = [
            ops.plan(s.H * s.G, s.H, s.D, lengths, query_starts, VLLM_ISA, threads) for _ in starts
        ]
        awake.openmp()
        begin_ns = time.perf_counter_ns()
        for table, plan in zip(tables, plans, strict=True):
            ops.decode(q, k, v, self._out, query_starts, lengths, s.scale, table, plan)
        return time.perf_counter_ns() - begin_ns

    def expected(self, inputs: Inputs, at: int) -> torch.Tensor:
        s = inputs.shape
        k, v = self._cache(inputs)
        k = k.as_strided((len(k), s.H, s.D, VLLM_BLOCK), (*k.stride()[:2], VLLM_BLOCK, 1))
        blocks = self._blocks(inputs, at)
        return reference_bf16(inputs, blocks, k.permute(0, 3, 1, 2), v.transpose(1, 2))

    def _cache(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [blocks, H, 128, D] as vLLM passes them: two halves of each head's part of a block."""
        s = inputs.shape
        bits = torch.from_numpy(inputs.pool.bits.view(np.int16)).view(torch.bfloat16)
        elements = s.H * 2 * VLLM_BLOCK * s.D
        blocks = len(bits) // elements
        both = bits[: blocks * elements].view(blocks, s.H, 2 * VLLM_BLOCK, s.D)
        return both[:, :, :VLLM_BLOCK], both[:, :, VLLM_BLOCK:]

    def _blocks(self, inputs: Inputs, at: int) -> torch.Tensor:
        """int32 [B, blocks]: a block, too, comes back after all others."""
        s = inputs.shape
        columns = s.R * s.S // VLLM_BLOCK
        assert columns * VLLM_BLOCK == s.R * s.S, "sizes are whole blocks"
        if s not in self._streams:
            self._streams[s] = PageStream(len(self._cache(inputs)[0]), s.B * columns, seed=1)
        stream = self._streams[s]
        begin = at * s.S // VLLM_BLOCK % stream.num_pages
        return torch.from_numpy(stream.ids[begin : begin + s.B * columns]).view(s.B, columns)


ALL = (SglKernel, Vllm)
