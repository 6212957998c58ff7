"""The pages important to a prompt's last token: named by the prefill server, prefetched by the decode server.

    prefill   the last prompt token's real queries  ->  scores of the prompt's digests  ->  the best pages of each layer
    transfer  their positions in the prompt, in the row of the prompt's last page, after its digests
    decode    copies them before the request joins (``requests.py``)

A hint only controls prefetching, never what is attended to: a wrong or missing one costs time, not accuracy.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.config import OffloadConfig

HINT_PAGES = 64
"""Pages per layer in a hint, best first. Independent of the budget, which the prefill server need not know."""


class PageHints:
    """For every page, the hint of the prompt that ends in it, on the host: 128 bytes per layer. Requests that share a
    page share the prompt up to it, and so the hint.

    Attributes:
        parts: ``[L, P, k / 2]`` int16 each, two as the transfer needs: position + 1 in the prompt, 0: none.
        made: how many hints were stored.
    """

    def __init__(self, layers: int, num_pages: int) -> None:
        size = layers, num_pages, HINT_PAGES // 2
        self._rows = [np.zeros(size, np.uint16) for _ in range(2)]
        self.made = 0
        self.parts = tuple(torch.from_numpy(rows.view(np.int16)) for rows in self._rows)

    def clear(self, pages: npt.NDArray[np.integer]) -> None:
        """``pages`` have new owners."""
        for rows in self._rows:
            rows[:, pages, 0] = 0

    def put(self, page: int, places: npt.NDArray[np.integer]) -> None:
        """Store the hint ``places`` ``[L, k]``, -1 padded, of a prompt whose last page is ``page``."""
        self.made += 1
        for rows, part in zip(self._rows, np.split(places + 1, 2, axis=1), strict=True):
            rows[:, page] = part

    def of(self, page: int, n_full: int) -> npt.NDArray[np.int64] | None:
        """``[L, k]`` positions among the ``n_full`` full pages of the prompt that ends in ``page``, -1 padded; or
        None."""
        places = np.concatenate([rows[:, page] for rows in self._rows], axis=1).astype(np.int64) - 1
        places[(places[:, :1] < 0) | (places >= n_full)] = -1  # without a first one: none
        return places if (places >= 0).any() else None


def hint_bytes(config: OffloadConfig, num_layers: int) -> int:
    """Bytes per page, on either server; 0 unless pages are selected for a whole layer, as in hints."""
    has_hints = config.grain == "layer" and config.digest != "none"
    return 2 * HINT_PAGES * num_layers * has_hints


def has_hint(address: int, row_bytes: int, page: int) -> bool:
    """Whether ``page`` has a hint, by the first layer of the first part at ``address``."""
    return ctypes.c_uint16.from_address(address + page * row_bytes).value > 0
