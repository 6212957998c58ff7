"""What travels with a page's K and V from the prefill server: its digest, and perhaps a hint.

A digest has two parts ``[L, P, H, bytes]``, whose bytes depend on its kind. A hint has the pages that are important to
a prompt's last token:

    prefill   the token's real queries  ->  scores of the prompt's digests  ->  the best pages of each layer
    transfer  their positions in the prompt, in the row of the prompt's last page, after its digests
    decode    copies them before the request joins (``requests.py``)

It only controls prefetching, never what is attended to: a wrong or missing one costs time, not accuracy.
Shapes: L layers, P pages, S tokens a page, H KV heads, D head size.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_scout.core.config import OffloadConfig
from sglang_scout.engine.device import upload
from sglang_scout.engine.digest_kinds import UNSET, Parts
from sglang_scout.engine.policy import SelectionRule
from sglang_scout.engine.step_inputs import Candidates
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.ops.pages import LayerPages
from sglang_scout.ops.select import select_pages

HINT_PAGES = 64
"""Pages per layer in a hint, best first. Independent of the budget, which the prefill server need not know."""

_MAX_HINT_PAGES = 2**16 - 2  # of a prompt: a position takes 16 bits
Ids = npt.NDArray[np.integer]


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


def _marks(parts: Parts) -> list[Tensor]:
    """``[L, P]`` int16 each: the first word of a page's digest and the last one."""
    first, second = (part.view(torch.int16) for part in parts)
    return [first[:, :, 0, 0], second[:, :, -1, -1]]


def unset(parts: Parts, ids: Tensor) -> None:
    """Mark rows ``ids`` of all layers as not written."""
    for mark in _marks(parts):
        # Not an assignment, which would copy the number from host memory and synchronize the stream.
        mark.index_fill_(1, ids, UNSET)


class DigestPool:
    """The digest of every page, and which are valid.

    A digest can arrive with the KV from the prefill server or be built here. Until it is written it holds a sentinel,
    by which arrival is recognised.

    Args:
        rule: its kind of digest, and this rank's part of its weights.
        hints: whether the prefill server sends hints.

    Attributes:
        kind: name of the kind.
        score, mass_change: those of the kind (:class:`DigestKind`).
        parts: ``[L, P, H, bytes]`` uint8 each, on ``device``.
        valid: ``[P]`` bool on the host; this page's digests are valid in every layer.
        hints: of prompts, by their last pages; None: no hints.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_pages: int,
        device: torch.device | str,
        rule: SelectionRule,
        hints: bool = False,
    ) -> None:
        of_kind, weights = rule.digest, rule.weights
        if of_kind.trained and weights is None:
            raise ValueError("this kind of digest needs the weights of a pilot_file")
        arrays = weights.arrays if weights is not None else {}
        self.kind = of_kind.name
        trained = [torch.tensor(arrays[name], device=device) for name in of_kind.trained]
        size = (shape.num_layers, num_pages, shape.num_kv_heads)
        first, second = (
            torch.zeros((*size, nbytes), dtype=torch.uint8, device=device)
            for nbytes in of_kind.part_bytes(shape, weights)
        )
        self.parts = first, second
        self._of_kind = of_kind(self.parts, shape, trained)
        self.score, self.mass_change = self._of_kind.score, self._of_kind.mass_change
        unset(self.parts, torch.arange(num_pages, device=device))
        self.hints = PageHints(*size[:2]) if hints else None
        self.valid = np.zeros(num_pages, bool)
        self._built: torch.cuda.Event | None = None  # the last ones, on the stream of the steps
        self.received = 0
        self.computed = 0

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def compile_kernels(self, host: HostPages, resident: LayerPages) -> None:
        """Compile and load kernels before the first request, using page 0, which is padding."""
        padding = np.zeros(1, np.int64)
        ids, slots = self._ids(padding), self._ids(np.zeros((len(resident.k), 1)))
        for source, rows in ((host.for_copies(self.device), None), (resident, slots)):
            self._of_kind.build(source, ids, rows)
        self.unset(padding)
        self.accept(padding)

    def invalidate(self, pages: Ids) -> None:
        """The pages were freed: their digests become invalid."""
        self.valid[pages] = False

    def unset(self, pages: Ids) -> None:
        """Mark the digests of freshly allocated pages as not written."""
        if self._built is not None:  # work launched for the pages' last owners must finish first
            torch.cuda.current_stream().wait_event(self._built)
        unset(self.parts, self._ids(pages))
        self.valid[pages] = False
        if self.hints is not None:
            self.hints.clear(pages)

    def accept(self, pages: Ids) -> Ids:
        """Mark those of ``pages`` whose digests have been written as valid; return the others.

        A real page has the word of an unset one with probability 1/65,536; its digest is then rebuilt. The host waits
        for the current stream, which must be that of :meth:`unset` or ordered after it.
        """
        ids = self._ids(pages)
        first, last = (words[:, ids] != UNSET for words in _marks(self.parts))
        complete = (first & last).all(0).cpu().numpy()
        self.valid[pages[complete]] = True
        self.received += int(complete.sum())
        return pages[~complete]

    def build(self, pages: Ids, host: HostPages) -> None:
        """Compute the digests of ``pages`` from their K."""
        if len(pages):
            self._build(pages, host.for_copies(self.device), self._ids(pages), None)

    def build_from_slots(self, pages: Ids, resident: LayerPages, slots: Ids) -> None:
        """Compute the digests of ``pages`` from the K in their ``slots`` ``[L, n]``."""
        if len(pages):
            both = self._ids(np.concatenate([pages[None], slots]))  # one transfer
            self._build(pages, resident, both[0], both[1:])

    def _build(self, pages: Ids, source: LayerPages, ids: Tensor, rows: Tensor | None) -> None:
        self._of_kind.build(source, ids, rows)
        if self._of_kind.has_mark:
            _marks(self.parts)[1].index_fill_(1, ids, 0)
        if self.device.type == "cuda":
            self._built = torch.cuda.Event()
            self._built.record()
        self.valid[pages] = True
        self.computed += len(pages)

    def _ids(self, pages: Ids) -> Tensor:
        return upload(np.ascontiguousarray(pages, np.int64), self.device)


def choose_hint(
    digests: DigestPool, queries: Tensor, pages: Ids, rule: SelectionRule, scale: float
) -> npt.NDArray[np.int32] | None:
    """``[L, k]`` positions of the pages that a decode step with these ``queries`` would select, by this rank's heads.

    Args:
        digests: valid ones, of ``pages`` ``[N]``, the prompt's full pages.
        queries: ``[L, HQ, D]`` fp32 real queries of its last token, after RoPE.
    Returns:
        None for a prompt without a full page, or too long for 16 bits.
    """
    if not 0 < len(pages) <= _MAX_HINT_PAGES:
        return None
    layers, device = len(queries), digests.device
    table = upload(np.ascontiguousarray(pages[None], np.int32), device)
    n_full = torch.full((layers,), len(pages), dtype=torch.int32, device=device)
    candidates = Candidates.of(table, n_full[:1], 1)
    scores = [
        digests.score(layer, queries[layer : layer + 1], candidates, scale)
        for layer in range(layers)
    ]
    places = torch.arange(len(pages), dtype=torch.int32, device=device)
    of_layers = torch.cat(scores), places.repeat(layers, 1), n_full, torch.zeros_like(places)
    forced = rule.sink_pages, rule.recent_pages
    chosen = select_pages(*of_layers, HINT_PAGES, *forced)
    return chosen.pages.cpu().numpy()
