"""What benchmark/kernels/cpu_attention.py compares: each implementation over the same pages of one pool."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.kernels import awake
from benchmark.kernels.kv_pool import KvPool, PageStream
from benchmark.kernels.read_loop import ReadLoop
from sglang_scout.ops import native
from sglang_scout.ops.attend import attend_pages

if TYPE_CHECKING:
    from benchmark.kernels.ipex_client import IpexClient

PAGE_SIZE = 32
ISAS = ("amx", "avx512bf16", "avx512", "avx2", "portable")  # the best first


@dataclass(frozen=True)
class Shape:
    """B sequences of R pages of S tokens; H KV heads of D, each with G query heads."""

    models: str
    B: int
    R: int
    H: int
    G: int
    D: int
    S: int = PAGE_SIZE

    @property
    def page_bytes(self) -> int:
        """Of K, in bfloat16."""
        return self.S * self.H * self.D * 2

    @property
    def call_bytes(self) -> int:
        """K and V that one call reads, in bfloat16."""
        return self.B * self.R * self.page_bytes * 2

    @property
    def scale(self) -> float:
        return self.D**-0.5


class Few(NamedTuple):
    """A page for each thread."""

    q: torch.Tensor
    pages: torch.Tensor


class Inputs:
    """Pool, query and page lists of one shape. q holds bfloat16 values, so that rounding it changes nothing."""

    def __init__(self, pool: KvPool, shape: Shape, stream: PageStream, q: torch.Tensor) -> None:
        self.pool, self.shape, self.stream, self.q = pool, shape, stream, q
        bits = torch.from_numpy(pool.bits.view(np.int16)).view(torch.bfloat16)
        half, P = len(bits) // 2, stream.num_pages
        self.k, self.v = (
            x[: P * shape.page_bytes // 2].view(P, shape.S, shape.H, shape.D)
            for x in (bits[:half], bits[half:])
        )

    def take(self, calls: int) -> list[int]:
        """Positions in the stream of the page lists of so many calls."""
        return [self.stream.take(self.shape.B * self.shape.R) for _ in range(calls)]

    def few(self, start: int, threads: int) -> Few:
        """For a call that takes no time and all threads: the page that comes last before position ``start``."""
        page = int(self.stream.ids[start - 1])
        q = self.q[:1].expand(threads, -1, -1).contiguous()
        return Few(q, torch.full((threads, 1), page, dtype=torch.int32))

    def pages(self, at: int) -> torch.Tensor:
        """int32 [B, R]"""
        n = self.shape.B * self.shape.R
        return torch.from_numpy(self.stream.ids[at : at + n]).view(self.shape.B, self.shape.R)


class TooSlow(Exception):
    """Given up in the middle: the machine's cores are taken, or the implementation is no match for the size."""


class Implementation(Protocol):
    """``tolerance`` bounds |out - expected|, absolute and relative. Equal ``layout``: equal ``expected``."""

    name: str
    tolerance: float
    layout: str

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        """Nanoseconds of one call per start."""
        ...

    def output(self) -> torch.Tensor:
        """float32 [B, HQ, D] of the last run, which had one call."""
        ...

    def expected(self, inputs: Inputs, at: int) -> torch.Tensor:
        """float32 [rows, HQ, D] of ``checked_rows``, in plain torch."""
        ...


def nowhere(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of NaN. Filled by numpy: torch's threads, once they have helped, poll for milliseconds on the core of
    another one."""
    out, lse = (np.full(shape, np.nan, np.float32) for shape in (q.shape, q.shape[:2]))
    return torch.from_numpy(out), torch.from_numpy(lse)


class OverBf16:
    """What implementations over the pool's bfloat16 pages share."""

    layout = "tokens first"

    def expected(self, inputs: Inputs, at: int) -> torch.Tensor:
        return reference_bf16(inputs, inputs.pages(at), inputs.k, inputs.v)


class Native(OverBf16):
    """attend_pages without its checks of arguments: next to nothing but the kernel is timed."""

    tolerance = 1e-5  # fp32 sums in another order

    def __init__(self, isa: str) -> None:
        self.isa, self.name = isa, f"native-{isa}"

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        native.module.set_isa(self.isa)
        torch.set_num_threads(threads)  # the kernel's own pool takes as many
        q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.shape.scale
        out = nowhere(q)
        self._out = out[0]
        tables = [inputs.pages(at) for at in starts]
        attend = next(i.run for i in attend_pages.implementations if i.name == "native")
        none = (None, None)  # no last page; no slots and no number of pages
        few = inputs.few(starts[0], threads)
        with awake.in_place(lambda: attend(few.q, k, v, few.pages, *none, scale, 0.0, None, *none)):
            begin_ns = time.perf_counter_ns()
            for pages in tables:
                attend(q, k, v, pages, *none, scale, 0.0, out, *none)
            return time.perf_counter_ns() - begin_ns

    def output(self) -> torch.Tensor:
        return self._out


class SdpaGather(OverBf16):
    """torch: sequence by sequence, copy its pages together (index_select), then SDPA in bfloat16.

    Plain: one query head each, enable_gqa, as SGLang's torch_native backend calls it. Grouped: the G query
    heads of a KV head as G query positions, which is the same sum without a mask and lets the library's
    flash kernel use each key G times.
    """

    tolerance = 2e-2  # torch rounds probabilities and outputs to bfloat16

    def __init__(self, grouped: bool, limit_s: float) -> None:
        """``limit_s``: run() gives up after this time. With fewer free cores than threads, torch can take a
        hundred times longer than it should."""
        self._grouped, self._limit_ns = grouped, int(limit_s * 1e9)
        self.name = self.name_of(grouped)

    @staticmethod
    def name_of(grouped: bool) -> str:
        return "sdpa-gather-grouped" if grouped else "sdpa-gather"

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        torch.set_num_threads(threads)
        s = inputs.shape
        q = inputs.q.bfloat16()
        q = q.view(s.B, 1, s.H, s.G, s.D) if self._grouped else q.view(s.B, 1, s.H * s.G, 1, s.D)
        self._out = torch.full_like(inputs.q, float("nan"), dtype=torch.bfloat16).view(q.shape)
        k = torch.empty(s.R, s.S, s.H, s.D, dtype=torch.bfloat16)
        v = torch.empty_like(k)
        heads_k, heads_v = (x.view(1, s.R * s.S, s.H, s.D).transpose(1, 2) for x in (k, v))
        tables = [inputs.pages(at) for at in starts]
        with torch.inference_mode():
            awake.openmp()
            begin_ns = time.perf_counter_ns()
            for table in tables:
                for b in range(s.B):
                    torch.index_select(inputs.k, 0, table[b], out=k)
                    torch.index_select(inputs.v, 0, table[b], out=v)
                    self._out[b] = F.scaled_dot_product_attention(
                        q[b], heads_k, heads_v, scale=s.scale, enable_gqa=not self._grouped
                    )
                    if time.perf_counter_ns() - begin_ns > self._limit_ns:
                        raise TooSlow(
                            f"given up after {self._limit_ns / 1e9:.1f} s, {b + 1} of {s.B} sequences"
                        )
            return time.perf_counter_ns() - begin_ns

    def output(self) -> torch.Tensor:
        s = self._out.shape
        return self._out.float().reshape(s[0], -1, s[-1])


class Ipex(OverBf16):
    """Paged attention of Intel Extension for PyTorch, in its own process on its own copy of the pool."""

    name = "ipex-2.8"
    tolerance = 2e-2
    layout = "heads first"

    def __init__(self, client: IpexClient) -> None:
        self._client = client

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        return self._client.run(inputs, starts, threads)

    def expected(self, inputs: Inputs, at: int) -> torch.Tensor:
        s = inputs.shape
        k, v = (x.view(-1, s.H, s.S, s.D).transpose(1, 2) for x in (inputs.k, inputs.v))
        return reference_bf16(inputs, inputs.pages(at), k, v)

    def output(self) -> torch.Tensor:
        return torch.from_numpy(self._client.output())


def isas() -> list[str]:
    """Instruction sets that this build and this machine have, the best first."""
    found, current = [], native.module.isa()
    for name in ISAS:
        try:
            native.module.set_isa(name)
        except ValueError:
            continue
        found.append(name)
    native.module.set_isa(current)
    return found


def checked_rows(shape: Shape) -> list[int]:
    """Sequences that are compared with the reference: the first and the last."""
    return sorted({0, shape.B - 1})


def reference_bf16(
    inputs: Inputs, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """float32 [rows, HQ, D] of the checked rows; pages and k, v [P, S, H, D] as who is checked reads the pool."""
    scale, parts = inputs.shape.scale, []
    for b in checked_rows(inputs.shape):
        out, _ = attend_pages.reference(
            inputs.q[b : b + 1], k, v, pages[b : b + 1], None, None, scale
        )
        parts.append(out)
    return torch.cat(parts)


def error_of(output: torch.Tensor, expected: torch.Tensor, tolerance: float) -> tuple[float, bool]:
    """(largest absolute error, whether all of it is within tolerance); NaN is neither."""
    error = (output - expected).abs()
    good = bool((error <= tolerance + tolerance * expected.abs()).all())
    return float(error.max()), good


def read_pages_ns(
    loop: ReadLoop, inputs: Inputs, starts: list[int], threads: int
) -> tuple[int, int]:
    """The page lists of several calls, read in order in one go: nanoseconds and checksum."""
    n = inputs.shape.B * inputs.shape.R
    ids = np.concatenate([inputs.stream.ids[at : at + n] for at in starts])
    return loop.pages_ns(
        inputs.k.data_ptr(), inputs.v.data_ptr(), inputs.shape.page_bytes, ids, threads
    )
