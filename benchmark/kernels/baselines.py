"""The baseline of cpu_attention.py: paged decode attention of vLLM (scripts/setup_baseline_kernels.sh).

It reads the same pool in its own cache layout, blocks of 128 tokens with K [D, 128] and then V [128, D] of each head,
so it has its own reference. IPEX 2.8, 4 to 6 times slower than ours, was a baseline up to commit 56dce02.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from benchmark.kernels.kv_pool import Inputs, PageStream, Shape
from benchmark.rows import ROOT
from sglang_scout.ops.attend import attend_pages

VLLM = ROOT / ".cache" / "baseline-kernels" / "vllm"
VLLM_BLOCK = 128  # tokens
VLLM_ISA = "vec"  # vLLM's choice for such blocks on a CPU without AMX


class Implementation:
    """``tolerance`` bounds |output - expected|, absolute and relative; None: no check."""

    name: str
    tolerance: float | None = None
    element_bytes = 2

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        """Nanoseconds of one call per start."""
        raise NotImplementedError

    def output(self) -> torch.Tensor:
        """float32 [rows, HQ, D] of ``checked_rows`` of the last call."""
        raise NotImplementedError

    def expected(self, inputs: Inputs, at: int) -> torch.Tensor:
        return reference(inputs, inputs.pages(at), inputs.k, inputs.v)


def reference(
    inputs: Inputs, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """float32 [rows, HQ, D] of the checked rows; pages and k, v [P, S, H, D] in the implementation's view."""
    parts = []
    for row in inputs.shape.checked_rows:  # one at a time: it copies the pages in float32
        q, table = inputs.q[row : row + 1], pages[row : row + 1]
        out, _ = attend_pages.reference(q, k, v, table, None, None, inputs.shape.scale)
        parts.append(out)
    return torch.cat(parts)


class Vllm(Implementation):
    """``cpu_attention_with_kv_cache`` of vLLM, with scheduler metadata built outside the timed region: vLLM builds it
    once per step, for all layers."""

    tolerance = 1e-2  # its output is bfloat16

    def __init__(self) -> None:
        torch.ops.load_library(VLLM / "attention.so")
        self.name = f"vllm-{json.loads((VLLM / 'about.json').read_text())['version']}"
        self._stream: tuple[Shape, PageStream] | None = None

    @staticmethod
    def absent() -> str:
        """Why it cannot be measured, "" if it can."""
        path = VLLM / "about.json"
        if not path.exists():
            return "no .cache/baseline-kernels/vllm; scripts/setup_baseline_kernels.sh makes it"
        if (built := json.loads(path.read_text())["torch"]) != torch.__version__:
            again = "scripts/setup_baseline_kernels.sh builds it again"
            return f"built for torch {built}, this is {torch.__version__}; {again}"
        known = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
        return "" if known else "needs a CPU with AVX-512 BF16"

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        torch.set_num_threads(threads)
        s, ops = inputs.shape, torch.ops.scout_benchmark_vllm
        q = inputs.q.bfloat16()
        out = torch.full_like(q, float("nan"))
        k, v = self._cache(inputs)
        query_starts = torch.arange(s.B + 1, dtype=torch.int32)
        lengths = torch.full((s.B,), s.R * s.S, dtype=torch.int32)
        tables = [self._blocks(inputs, at) for at in starts]
        plans = [
            ops.plan(s.H * s.G, s.H, s.D, lengths, query_starts, VLLM_ISA, threads) for _ in starts
        ]
        begin_ns = time.perf_counter_ns()
        for table, plan in zip(tables, plans, strict=True):
            ops.decode(q, k, v, out, query_starts, lengths, s.scale, table, plan)
        ns = time.perf_counter_ns() - begin_ns
        self._out = out[s.checked_rows].float()
        return ns

    def output(self) -> torch.Tensor:
        return self._out

    def expected(self, inputs: Inputs, at: int) -> torch.Tensor:
        s = inputs.shape
        k, v = self._cache(inputs)
        k = k.as_strided((len(k), s.H, s.D, VLLM_BLOCK), (*k.stride()[:2], VLLM_BLOCK, 1))
        blocks = self._blocks(inputs, at)
        return reference(inputs, blocks, k.permute(0, 3, 1, 2), v.transpose(1, 2))

    def _cache(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [blocks, H, 128, D] as vLLM passes them: two halves of each head's part of a block."""
        s, elements = inputs.shape, inputs.pool.elements
        block = s.H * 2 * VLLM_BLOCK * s.D
        both = elements[: len(elements) // block * block].view(-1, s.H, 2 * VLLM_BLOCK, s.D)
        return both[:, :, :VLLM_BLOCK], both[:, :, VLLM_BLOCK:]

    def _blocks(self, inputs: Inputs, at: int) -> torch.Tensor:
        """int32 [B, blocks]: a block, too, is reused only after all others."""
        s = inputs.shape
        columns = s.R * s.S // VLLM_BLOCK
        assert columns * VLLM_BLOCK == s.R * s.S, "sizes are whole blocks"
        if self._stream is None or self._stream[0] is not s:
            blocks = len(self._cache(inputs)[0])
            self._stream = s, PageStream(blocks, s.B * columns, seed=1)
        ids = self._stream[1].ids
        start = at * s.S // VLLM_BLOCK % self._stream[1].num_pages
        return torch.from_numpy(ids[start : start + s.B * columns]).view(s.B, columns)
