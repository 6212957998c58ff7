"""The page table of every request on the host, maintained without reading the device at each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class RequestTables:
    """Tracks what SGLang writes into its request table.

    Whole requests are written once, when they are admitted or hit a shared prefix; their pages are then read from the
    device. A page opened by decoding is known from the allocator.

    Args:
        pool: SGLang's request pool; its ``write`` is wrapped from now on.
        page_size: tokens of a page.
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
        first = -(-(tokens.start or 0) // self._size)  # first page that begins in the slice
        starts = values[first * self._size - (tokens.start or 0) :: self._size]
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
        """Before a decode step of ``rows`` ``[B]`` of the table.

        Args:
            positions: ``[B]`` of the tokens that it writes.
            opened: ``[B]`` pages that start with them, -1: none.
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
