"""The pages important to a prompt's last token: named by the prefill server, prefetched by the decode server.

    prefill   the last prompt token's real queries  ->  scores of the prompt's digests  ->  the best pages of each layer
    transfer  their positions in the prompt, in the row of the prompt's last page, after its digests
    decode    copies them before the request joins (``arrivals.py``)

A hint only controls prefetching, never what is attended to: a wrong or missing one costs time, not accuracy.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.config import OffloadConfig
from sglang_scout.engine.device import upload
from sglang_scout.engine.offered import Offered
from sglang_scout.ops.select import select_pages
from sglang_scout.policy.base import Digest

if TYPE_CHECKING:
    from sglang_scout.engine.digest_pool import DigestPool

HINT_PAGES = 64
"""Pages per layer in a hint, best first. Independent of the budget, which the prefill server need not know."""

_MOST_PAGES = 2**16 - 2  # a position takes 16 bits


class PageHints:
    """For every page, the hint of the prompt that ends in it, on the host: 128 bytes per layer.

    Pages shared by the radix cache belong to the same prompt prefix, and so does the hint.

    Args:
        layers, num_pages: L, P of the pool.

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
        """``[L, k]`` positions among the ``n_full`` full pages of the prompt that ends in ``page``, -1 padded.

        None: no hint.
        """
        places = np.concatenate([rows[:, page] for rows in self._rows], axis=1).astype(np.int64) - 1
        places[(places[:, :1] < 0) | (places >= n_full)] = -1  # without a first one: none
        return places if (places >= 0).any() else None


def hint_bytes(config: OffloadConfig, num_layers: int) -> int:
    """Bytes per page, on either server; 0 unless pages are selected for a whole layer, as in hints."""
    has_hints = config.grain == "layer" and not config.context_share
    return 2 * HINT_PAGES * num_layers * has_hints


def has_hint(address: int, row_bytes: int, page: int) -> bool:
    """Whether ``page`` has a hint, by the first layer of the first part at ``address``."""
    return ctypes.c_uint16.from_address(address + page * row_bytes).value > 0


def choose_hint(
    digests: DigestPool,
    queries: torch.Tensor,
    pages: npt.NDArray[np.integer],
    digest: Digest,
    scale: float,
) -> npt.NDArray[np.int32] | None:
    """``[L, k]`` positions of the pages that a decode step with these ``queries`` would select.

    With tensor parallelism only this rank's heads count.

    Args:
        digests: valid ones, of ``pages`` ``[N]``, the prompt's full pages.
        queries: ``[L, HQ, D]`` fp32 real queries of its last token, after RoPE.
    Returns:
        None for a prompt without a full page, or too long for 16 bits.
    """
    if not 0 < len(pages) <= _MOST_PAGES:
        return None
    layers, device = len(queries), digests.device
    table = upload(np.ascontiguousarray(pages[None], np.int32), device)
    n_full = torch.full((layers,), len(pages), dtype=torch.int32, device=device)
    offered = Offered.of(table, n_full[:1], 1)
    scores = [
        digests.score(layer, queries[layer : layer + 1], offered, scale, digest.head_reduce)
        for layer in range(layers)
    ]
    places = torch.arange(len(pages), dtype=torch.int32, device=device)
    chosen = select_pages(
        torch.cat(scores), places.repeat(layers, 1), n_full, torch.zeros_like(places),
        HINT_PAGES, digest.sink_pages, digest.recent_pages, digest.mass,
    )  # fmt: skip
    return chosen.pages.cpu().numpy()
