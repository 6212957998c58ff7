"""Memory for KV pages, far larger than the caches, and page lists that never come back while cached.

No torch here: the environment of IPEX imports this module too.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np

TILE_ELEMENTS = (
    33_554_393  # prime, so that no two pages of a pool begin at the same element of the tile
)
_V_SHIFT = 7_654_321  # V takes the tile from another place than K


def make_tile(seed: int) -> np.ndarray:
    """uint16 [TILE_ELEMENTS], bits of bfloat16 numbers of a normal distribution."""
    values = np.random.default_rng(seed).standard_normal(TILE_ELEMENTS, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


class KvPool:
    """Anonymous memory: K in the lower half, V in the upper half, filled by repeating a tile.

    Args:
        nbytes: of K and V together.
        huge: ask for transparent huge pages; otherwise refuse them (then the memory is like that of the
            worker's arena where the system allows no huge pages for shared memory).
        tile: from make_tile; without it the memory is not touched yet.

    Attributes:
        backing: "thp" or "4k", as the system says that it is, or "mixed".
        bits: uint16 [nbytes / 2], K then V.
    """

    def __init__(self, nbytes: int, huge: bool, tile: np.ndarray | None = None) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        self.bits = np.frombuffer(self._map, np.uint16)
        if tile is not None:
            half = len(self.bits) // 2
            _repeat(tile, 0, self.bits[:half])
            _repeat(tile, _V_SHIFT, self.bits[half:])
        self.k_address = self.bits.ctypes.data
        self.v_address = self.k_address + nbytes // 2
        self.look()

    def look(self) -> None:
        """Sets ``backing`` by what the system says now."""
        share = _huge_share(self.k_address, self.nbytes)
        self.backing = "thp" if share > 0.95 else "4k" if share < 0.05 else "mixed"

    def num_pages(self, page_bytes: int) -> int:
        """Pages of K, each of ``page_bytes``, that fit."""
        return self.nbytes // 2 // page_bytes


class PageStream:
    """Shuffled page ids without end; an id comes back only after all others.

    ``ids`` int32 is the shuffled list repeated, so that any ``take(n)`` with n <= longest is one slice of it.
    """

    def __init__(self, num_pages: int, longest: int, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
        self.num_pages = num_pages
        self.ids = np.tile(order, -(-longest // num_pages) + 1)
        self._at = 0

    def take(self, n: int) -> int:
        """Position in ``ids`` of the next n."""
        at = self._at
        assert at + n <= len(self.ids)
        self._at = (at + n) % self.num_pages
        return at


def _repeat(tile: np.ndarray, start: int, to: np.ndarray) -> None:
    at = min(len(tile) - start, len(to))
    to[:at] = tile[start : start + at]
    while at < len(to):
        n = min(len(tile), len(to) - at)
        to[at : at + n] = tile[:n]
        at += n


def _huge_share(address: int, nbytes: int) -> float:
    """Share of a mapping that lies in transparent huge pages."""
    inside, huge_kb = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if match:
            first, last = int(match[1], 16), int(match[2], 16)
            inside = first < address + nbytes and last > address
        elif inside and line.startswith("AnonHugePages:"):
            huge_kb += int(line.split()[1])
    return min(1.0, huge_kb * 1024 / nbytes)


def available_bytes() -> int:
    """Memory that may be taken without swapping, 0 if it is not known."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
