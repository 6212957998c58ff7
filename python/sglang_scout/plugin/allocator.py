"""The host's view of pages: SGLang's allocator with its free lists on the host, and the page table of every request.

The step boundary needs the ids of new pages on the host. SGLang's own lists are on the device, so reading an id would
wait for all launched work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.pages import Pages

NODE_RUN_PAGES = 8
"""Consecutive pages that a request gets from one NUMA node before the next node: 256 tokens."""

_NO_PAGES = torch.empty(0, dtype=torch.int64)


class DigestListener:
    """The listener of a prefill server, where only digests depend on the pages."""

    def __init__(self, digests: DigestPool) -> None:
        self._digests = digests

    def allocate_pages(self, pages: npt.NDArray[np.int64]) -> None:
        self._digests.unset(pages)

    def free_pages(self, pages: npt.NDArray[np.int64]) -> None:
        self._digests.invalidate(pages)

    def may_be_written(self, pages: npt.NDArray[np.int64]) -> bool:
        return False  # pages change owner in stream order

    def clear(self) -> None:
        self._digests.valid[:] = False


def alternate_nodes(pages: torch.Tensor, stripe_pages: int) -> torch.Tensor:
    """Free ``pages`` ``[n]`` in an order in which the first ones, however many, are spread evenly over the NUMA nodes.

    Page i is on node ``i // stripe_pages``. Runs of ``NODE_RUN_PAGES`` stay together, as the KV transfer sends
    consecutive pages in one piece. A node with fewer free pages than the others is used up first.
    """
    pages = torch.sort(pages).values
    _, counts = torch.unique_consecutive(pages // stripe_pages, return_counts=True)
    begins = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    place_in_node = torch.arange(len(pages), device=pages.device) - begins
    return pages[torch.argsort(place_in_node // NODE_RUN_PAGES, stable=True)]


class ScoutAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's page allocator with its lists on the host; results are on ``device``.

    Attributes:
        listener: notified of every page allocated or freed, however its request ended.
        opened: ``[B]`` page that each row of the last :meth:`alloc_decode` has opened, -1: none.
    """

    listener: Pages | DigestListener | None = None
    opened: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def used_pages(self) -> int:
        return self.num_pages - len(self.free_pages) - len(self.release_pages)

    def _alternate_nodes(self) -> None:
        arena = getattr(self._kvcache, "arena", None)
        if arena is not None and arena.spec.num_nodes > 1:
            self.free_pages = alternate_nodes(self.free_pages, arena.spec.stripe_pages)

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.num_pages + 1, dtype=torch.int64)
        self._alternate_nodes()
        self.release_pages = _NO_PAGES
        self._held_back: list[torch.Tensor] | None = None  # freed within a group
        if self.listener is not None:
            self.listener.clear()

    def available_size(self) -> int:
        return (len(self.free_pages) + len(self.release_pages)) * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        return torch.cat((self.free_pages, self.release_pages))

    def merge_and_sort_free(self) -> None:
        if len(self.release_pages):
            self.free_pages = torch.cat((self.free_pages, self.release_pages)).sort().values
            self.release_pages = _NO_PAGES
            self._alternate_nodes()

    def _take(self, count: int) -> torch.Tensor | None:
        """The next ``count`` free pages, or None if there are fewer."""
        if self.need_sort and count > len(self.free_pages):
            self.merge_and_sort_free()
        if count > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        if count and self.listener is not None:
            self.listener.allocate_pages(taken.numpy().copy())
        return taken

    def _take_for_others(self, count: int) -> torch.Tensor | None:
        """:meth:`_take` for pages written outside of the stream: the KV transfer is not ordered with steps."""
        taken = self._take(count)
        if taken is not None and self.listener is not None:
            if self.listener.may_be_written(taken.numpy()):
                self._wait_for_steps()
        return taken

    def _wait_for_steps(self) -> None:
        if torch.device(self.device).type != "cpu":
            torch.cuda.synchronize(self.device)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        taken = self._take_for_others(need_size // self.page_size)
        if taken is None:
            return None
        locations = taken[:, None] * self.page_size + torch.arange(self.page_size)
        return self._result(locations.flatten())

    def alloc_extend(
        self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, *_: Any, **__: Any
    ) -> torch.Tensor | None:
        size = self.page_size
        opened = (seq_lens_cpu + size - 1) // size - (prefix_lens_cpu + size - 1) // size
        taken = self._take_for_others(int(opened.sum()))
        if taken is None:
            return None
        inside = prefix_lens_cpu % size != 0  # the prefix's last page continues
        last = last_loc.cpu() if bool(inside.any()) else torch.zeros_like(prefix_lens_cpu)
        pieces, slots = [], (taken[:, None] * size + torch.arange(size)).flatten()
        for row, count in enumerate(opened.tolist()):
            begin, end = int(prefix_lens_cpu[row]), int(seq_lens_cpu[row])
            rest = min(-begin % size, end - begin)
            pieces += int(last[row]) + 1 + torch.arange(rest), slots[: end - begin - rest]
            slots = slots[count * size :]
        return self._result(torch.cat(pieces))

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        opens = (seq_lens_cpu - 1) % self.page_size == 0
        taken = self._take(int(opens.sum()))
        if taken is None:
            return None
        pages = torch.full((len(opens),), -1, dtype=torch.int64)
        pages[opens] = taken
        self.opened = pages.numpy()
        on_device = self._result(pages)
        return torch.where(on_device >= 0, on_device * self.page_size, last_loc.long() + 1)

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if self._held_back is not None:
            self._held_back.append(free_index.clone())  # the caller may overwrite it
            return
        pages = torch.unique(free_index.cpu() // self.page_size)
        if self.need_sort:
            self.release_pages = torch.cat((pages, self.release_pages))
        else:
            self.free_pages = torch.cat((pages, self.free_pages))
        if self.listener is not None:
            self.listener.free_pages(pages.numpy())

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Locations of whole pages, except maybe the last, starting at a page boundary."""
        self.free(free_index[:: self.page_size])

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        self.free(page_ids * self.page_size)

    def free_group_begin(self) -> None:
        self._held_back = []

    def free_group_end(self) -> None:
        held_back, self._held_back = self._held_back, None
        if held_back:
            self.free(torch.cat(held_back))

    def _result(self, locations: torch.Tensor) -> torch.Tensor:
        if torch.device(self.device).type == "cpu":
            return locations.clone()
        return locations.pin_memory().to(self.device, non_blocking=True)


class RequestTables:
    """The pages in SGLang's request table, on the host.

    Whole requests are read from the device when SGLang writes them, as they are admitted or hit a shared prefix. A page
    opened by decoding is known from the allocator.

    Args:
        pool: SGLang's request pool; its ``write`` is wrapped from now on.
    """

    def __init__(self, pool: Any, page_size: int) -> None:
        rows, tokens = pool.req_to_token.shape
        self._size = page_size
        self._pages = np.zeros((rows, -(-tokens // page_size)), np.int32)
        self._write = pool.write
        self._rows = np.zeros(0, np.int64)
        pool.write = self.write

    def write(self, indices: Any, values: torch.Tensor) -> None:
        """Like the pool's: ``indices`` is (row, slice of tokens) or (rows, positions)."""
        self._write(indices, values)
        row, tokens = indices
        if not isinstance(tokens, slice):
            return  # from a decode step: see open_pages
        start = tokens.start or 0
        first = -(-start // self._size)  # page that begins in the slice
        starts = values[first * self._size - start :: self._size]
        if len(starts):
            pages = (starts // self._size).cpu().numpy()
            self._pages[int(row), first : first + len(pages)] = pages

    def pages_of(self, row: int, tokens: int) -> npt.NDArray[np.int64]:
        """``[N]`` pages that hold the first ``tokens`` tokens of the request in ``row``."""
        return self._pages[row, : -(-tokens // self._size)].astype(np.int64)

    def open_pages(
        self,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        opened: npt.NDArray[np.int64],
    ) -> None:
        """Before a decode step of ``rows`` ``[B]``, which writes tokens at ``positions`` ``[B]``.

        Args:
            opened: ``[B]`` pages that start with these tokens, -1: none.
        """
        opens = opened >= 0
        self._pages[rows[opens], positions[opens] // self._size] = opened[opens]
        self._rows = rows.copy()

    def of_step(
        self, seq_lens: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """``[B, N]`` pages and ``[B]`` rows of the table, of the last announced step."""
        if len(seq_lens) != len(self._rows):
            raise RuntimeError(
                f"--kv-offload: a step of {len(seq_lens)} requests, {len(self._rows)} were announced"
            )
        columns = -(-int(seq_lens.max()) // self._size)
        return self._pages[self._rows, :columns], self._rows
