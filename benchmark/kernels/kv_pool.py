"""Memory for KV pages, far larger than the caches, and page lists that never repeat pages still cached."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Shape:
    """B sequences of R pages of S tokens; H KV heads of D, each with G query heads."""

    models: str
    B: int
    R: int
    H: int
    G: int
    D: int
    S: int = 32

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


class KvPool:
    """Anonymous memory, in huge pages if the system has them: K in the lower half, V in the upper half.

    Args:
        nbytes: of K and V together.

    Attributes:
        elements: bfloat16 [nbytes / 2] of a normal distribution, K then V. The same in every process.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        elements = torch.from_numpy(_mapped(nbytes)).view(torch.bfloat16)
        self.elements = elements.normal_(generator=torch.Generator().manual_seed(0))

    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        """The elements converted to an 8-bit type, in separate memory."""
        return torch.from_numpy(_mapped(self.nbytes // 2)).view(dtype).copy_(self.elements)

    def planes(
        self, shape: Shape, elements: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [P, S, H, D], of the result of `rounded` if given."""
        elements = self.elements if elements is None else elements
        half, page = len(elements) // 2, shape.page_bytes // 2
        k, v = (
            plane[: half // page * page].view(-1, shape.S, shape.H, shape.D)
            for plane in (elements[:half], elements[half:])
        )
        return k, v


class Inputs:
    """Query and page lists of one shape over a pool: an endless stream of shuffled page ids, of which one repeats only
    after all others. q is exact in bfloat16.

    Attributes:
        ids: int32, the shuffled list repeated, so that the list of any call is one slice of it.
    """

    def __init__(self, pool: KvPool, shape: Shape) -> None:
        self.pool, self.shape, self._at = pool, shape, 0
        self.num_pages, self.call_pages = len(pool.planes(shape)[0]), shape.B * shape.R
        order = np.random.default_rng(1).permutation(self.num_pages).astype(np.int32)
        self.ids = np.tile(order, -(-self.call_pages // self.num_pages) + 1)
        q = np.random.default_rng(2).standard_normal((shape.B, shape.H * shape.G, shape.D))
        self.q = torch.from_numpy(q).bfloat16().float()

    def take(self, calls: int) -> list[int]:
        """Positions in ``ids`` of the page lists of ``calls`` calls."""
        starts = [(self._at + i * self.call_pages) % self.num_pages for i in range(calls)]
        self._at = (self._at + calls * self.call_pages) % self.num_pages
        return starts

    def pages(self, at: int) -> torch.Tensor:
        """int32 [B, R]"""
        return torch.from_numpy(self.ids[at : at + self.call_pages]).view(self.shape.B, -1)


def _mapped(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] of anonymous memory."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
