"""The digests of all pages, and which of them are valid.

A page has two parts ``[L, P, H, bytes]``, whose bytes depend on the kind of digest, and which are transferred with K
and V from the prefill server. Shapes: L layers, P pages, S tokens a page, H KV heads, D head size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine.device import upload
from sglang_scout.engine.digest_kinds import UNSET, Parts
from sglang_scout.engine.hints import HINT_PAGES, PageHints
from sglang_scout.engine.policy import SelectionRule
from sglang_scout.engine.step_inputs import Candidates
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.select import select_pages

_MOST_HINT_PAGES = 2**16 - 2  # of a prompt: a position takes 16 bits
Ids = npt.NDArray[np.integer]


def _marks(parts: Parts) -> list[torch.Tensor]:
    """``[L, P]`` int16 each: the first word of a page's digest and the last one."""
    first, second = (part.view(torch.int16) for part in parts)
    return [first[:, :, 0, 0], second[:, :, -1, -1]]


def unset(parts: Parts, ids: torch.Tensor) -> None:
    """Mark rows ``ids`` of all layers as not written."""
    for mark in _marks(parts):
        # Not an assignment, which would copy the number from host memory and synchronize the stream.
        mark.index_fill_(1, ids, UNSET)


class DigestPool:
    """The digest of every page, and which are valid.

    A digest can arrive with the KV from the prefill server or be built here. Until it is written it holds a sentinel,
    by which arrival is recognised. One made with another digest file counts as not arrived.

    Args:
        rule: its kind of digest, and this rank's part of its weights.
        hints: whether the prefill server sends hints.

    Attributes:
        kind, trained: name of the kind; arrays of its weights on the device.
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
            raise ValueError(
                "this kind of digest needs the weights of a pilot_file or a digest_file"
            )
        arrays = weights.arrays if weights is not None else {}
        self.kind = of_kind.name
        self.trained = [torch.tensor(arrays[name], device=device) for name in of_kind.trained]
        size = (shape.num_layers, num_pages, shape.num_kv_heads)
        first, second = of_kind.part_bytes(shape.head_dim, shape.dtype.itemsize, weights)
        self.parts = (
            torch.zeros((*size, first), dtype=torch.uint8, device=device),
            torch.zeros((*size, second), dtype=torch.uint8, device=device),
        )
        self._of_kind = of_kind(self.parts, shape, self.trained)
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
        mark, ids = self._of_kind.mark, self._ids(pages)
        first, last = (words[:, ids] for words in _marks(self.parts))
        wrong = (first == UNSET) | (last == UNSET if mark is None else last != mark)
        complete = ~wrong.any(0).cpu().numpy()
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

    def _build(
        self, pages: Ids, source: LayerPages, ids: torch.Tensor, rows: torch.Tensor | None
    ) -> None:
        self._of_kind.build(source, ids, rows)
        if self._of_kind.mark is not None:
            _marks(self.parts)[1].index_fill_(1, ids, self._of_kind.mark)
        if self.device.type == "cuda":
            self._built = torch.cuda.Event()
            self._built.record()
        self.valid[pages] = True
        self.computed += len(pages)

    def _ids(self, pages: Ids) -> torch.Tensor:
        return upload(np.ascontiguousarray(pages, np.int64), self.device)


def choose_hint(
    digests: DigestPool, queries: torch.Tensor, pages: Ids, rule: SelectionRule, scale: float
) -> npt.NDArray[np.int32] | None:
    """``[L, k]`` positions of the pages that a decode step with these ``queries`` would select, by this rank's heads.

    Args:
        digests: valid ones, of ``pages`` ``[N]``, the prompt's full pages.
        queries: ``[L, HQ, D]`` fp32 real queries of its last token, after RoPE.
    Returns:
        None for a prompt without a full page, or too long for 16 bits.
    """
    if not 0 < len(pages) <= _MOST_HINT_PAGES:
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
    chosen = select_pages(
        torch.cat(scores),
        places.repeat(layers, 1),
        n_full,
        torch.zeros_like(places),
        HINT_PAGES,
        rule.sink_pages,
        rule.recent_pages,
        rule.mass,
    )
    return chosen.pages.cpu().numpy()
