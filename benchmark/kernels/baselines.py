"""Baselines of cpu_attention.py: paged decode attention of IPEX and of vLLM, each over the same pool in its own cache
layout.

    ipex    [P, H, S, D], in a separate process with its own torch (scripts/setup_ipex.sh)
    vllm    blocks of 128 tokens: per head K [D, 128], then V [128, D] (scripts/setup_baseline_kernels.sh)

The same bytes are interpreted differently, so each has its own reference.
"""

from __future__ import annotations

import json
import select
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmark.kernels.kv_pool import Inputs, PageStream, Shape
from benchmark.rows import ROOT
from sglang_scout.ops.attend import attend_pages

IPEX_PYTHON = ROOT / ".cache" / "ipex-venv" / "bin" / "python"
VLLM = ROOT / ".cache" / "baseline-kernels" / "vllm"
VLLM_BLOCK = 128  # tokens
VLLM_ISA = "vec"  # vLLM's choice for such blocks on a CPU without AMX
TIMEOUT_S = 120.0


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

    def close(self) -> None:
        """Stops whatever it has started."""


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


class Ipex(Implementation):
    """Paged attention of Intel Extension for PyTorch: the process of ipex_server.py, which makes the same inputs from
    the same seeds.

    Raises:
        RuntimeError: from every method, where the process failed or is silent.
    """

    name = "ipex-2.8"
    tolerance = 2e-2

    def __init__(self, pool_bytes: int) -> None:
        self._shape: Shape | None = None
        self._log = ROOT / ".cache" / "benchmark" / "ipex.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(IPEX_PYTHON), "-m", "benchmark.kernels.ipex_server", str(pool_bytes)],
                cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                bufsize=1,
            )  # fmt: skip

    @staticmethod
    def absent() -> str:
        """Why it cannot be measured, "" if it can."""
        return "" if IPEX_PYTHON.exists() else "no .cache/ipex-venv; scripts/setup_ipex.sh makes it"

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        if inputs.shape is not self._shape:
            self._shape = inputs.shape
            self._ask(op="shape", **asdict(inputs.shape))
        return int(self._ask(op="run", threads=threads, starts=starts))

    def output(self) -> torch.Tensor:
        return torch.tensor(self._ask(op="output"))

    def expected(self, inputs: Inputs, at: int) -> torch.Tensor:
        s = inputs.shape
        k, v = (x.view(-1, s.H, s.S, s.D).transpose(1, 2) for x in (inputs.k, inputs.v))
        return reference(inputs, inputs.pages(at), k, v)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except OSError as error:
            raise RuntimeError(f"the process has ended, see {self._log}") from error
        if not select.select([self._process.stdout], [], [], TIMEOUT_S)[0]:
            raise RuntimeError(f"{request['op']}: no answer within {TIMEOUT_S:.0f} s")
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the process ended, see {self._log}"}
        if "error" in answer:
            raise RuntimeError(f"{request['op']}: {answer['error']}")
        return answer["result"]


class Vllm(Implementation):
    """``cpu_attention_with_kv_cache`` of vLLM, with scheduler metadata built outside the timed region: vLLM builds it
    once per step, for all layers."""

    tolerance = 1e-2  # its output is bfloat16

    def __init__(self, pool_bytes: int) -> None:
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
