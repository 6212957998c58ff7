"""int8 pages for benchmark/cpu_attention.py: the pool's bfloat16 pages, quantised once per page geometry."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

import awake
from attention_impls import Inputs, Shape, checked_rows, nowhere, reference_bf16
from kv_pool import KvPool
from sglang_scout.ops import native
from sglang_scout.ops.attend import attend_reference

_CHUNK_PAGES = 256


def _op(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"sglang_scout.ops.{name}")
    except ImportError:
        return None


def absent_reason() -> str:
    """Why the int8 kernel cannot be measured, "" if it can."""
    kernels, quantize = _op("native_int8"), _op("quantize")
    if kernels is None or quantize is None:
        return "this version has no int8 pages"
    codes, scales = quantize.room_for(1, 16, 1, 16)
    pages = torch.zeros(1, 1, dtype=torch.int32)
    inputs = (torch.zeros(1, 1, 16), codes.zero_(), scales.zero_(), 16, pages, None, None, 1.0)
    reasons = kernels.ATTEND_PAGES_INT8.reasons(*inputs)
    if reasons:
        return "; ".join(reasons)
    try:
        kernels.ATTEND_PAGES_INT8.run(*inputs)
    except AttributeError:
        return "the native module was built without the int8 kernel"
    return ""


@dataclass
class _Pages:
    pool: KvPool  # keeps the memory
    codes: torch.Tensor  # as attend_pages_int8 takes them
    scales: torch.Tensor
    page_size: int


class Int8Pages:
    """Codes and scales of the pages of a pool, made when a geometry is first asked for."""

    def __init__(self, huge: bool) -> None:
        self._huge = huge
        self._made: dict[tuple[int, int, int], _Pages] = {}

    def of(self, inputs: Inputs) -> _Pages:
        s = inputs.shape
        key = (s.S, s.H, s.D)
        if key not in self._made:
            self._made[key] = self._quantize(inputs)
        return self._made[key]

    def _quantize(self, inputs: Inputs) -> _Pages:
        quantize = _op("quantize")
        assert quantize is not None
        P, S, H, D = inputs.k.shape
        codes, scales = quantize.room_for(P, S, H, D)
        pool = KvPool(codes.numel(), self._huge)
        codes = torch.from_numpy(pool.bits.view(np.int8))[: codes.numel()].view(codes.shape)
        for first in range(0, P, _CHUNK_PAGES):
            ids = torch.arange(first, min(first + _CHUNK_PAGES, P))
            quantize.quantize_pages(inputs.k, inputs.v, ids, codes, scales, ids)
        pool.look()  # now that it has been written
        return _Pages(pool, codes, scales, S)


class NativeInt8:
    """attend_pages_int8; checked against plain torch over the same codes."""

    tolerance = 2e-4  # 16-bit codes of query and weights: ops/attend_int8.py, rounding_bound
    layout = "int8"

    def __init__(self, isa: str, pages: Int8Pages) -> None:
        self.isa, self.name, self._pages = isa, f"native-int8-{isa}", pages

    def call_bytes(self, shape: Shape) -> int:
        scales = 2 * 4 * shape.H
        return shape.B * shape.R * (shape.page_bytes + scales)

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        kernels = _op("native_int8")
        assert kernels is not None
        native.set_isa(self.isa)
        torch.set_num_threads(threads)
        p, q, scale = self._pages.of(inputs), inputs.q, inputs.shape.scale
        out = nowhere(q)
        self._out = out[0]
        tables = [inputs.pages(at) for at in starts]
        attend = kernels.ATTEND_PAGES_INT8.run
        few, pool = inputs.few(starts[0], threads), (p.codes, p.scales, p.page_size)
        with awake.in_place(lambda: attend(few.q, *pool, few.pages, None, None, scale)):
            begin_ns = time.perf_counter_ns()
            for pages in tables:
                attend(q, *pool, pages, None, None, scale, 0.0, out)
            return time.perf_counter_ns() - begin_ns

    def output(self) -> torch.Tensor:
        return self._out

    def expected(self, inputs: Inputs, at: int) -> torch.Tensor:
        p, s, pages = self._pages.of(inputs), inputs.shape, inputs.pages(at)
        quantize = _op("quantize")
        assert quantize is not None
        parts = []
        for b in checked_rows(s):
            ids = pages[b].long()
            codes = quantize.plain_codes(p.codes[ids], p.page_size, s.D)
            k, v = map(quantize.dequantize_pages, codes, p.scales[ids].unbind(1))
            here = torch.arange(len(ids), dtype=torch.int32)[None]
            out, _ = attend_reference(inputs.q[b : b + 1], k, v, here, None, None, s.scale)
            parts.append(out)
        return torch.cat(parts)

    def more(self, inputs: Inputs, at: int, output: torch.Tensor) -> dict[str, float | str]:
        """What quantising costs: against fp32 attention over the bfloat16 pages."""
        exact = reference_bf16(inputs, inputs.pages(at), inputs.k, inputs.v)
        error = output - exact
        return {
            "int8_max_abs_error": float(f"{error.abs().max():.3g}"),
            "int8_rms_error": float(f"{error.square().mean().sqrt():.3g}"),
            "output_rms": float(f"{exact.square().mean().sqrt():.3g}"),
            "int8_backing": self._pages.of(inputs).pool.backing,
        }
