"""How good predicted queries are, measured while a server decodes (paper Table 1 and section 3.3).

Any number of predictors are compared side by side on the same inputs; none of them affects serving. Per
step and layer one JSON line, see :meth:`QualityRecorder.attention`. Slow: for measurements only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.correction import write_arrays
from sglang_scout.core.fit import INPUTS_VERSION
from sglang_scout.engine.boundary import Batch
from sglang_scout.engine.forecast import Forecast, LayerInputs
from sglang_scout.engine.pools import DigestPool, HostPages, ModelShape
from sglang_scout.engine.ranks import Ranks, SharedChoice
from sglang_scout.ops.select import select_pages
from sglang_scout.policy.axes import DigestAxis

K_PAGES = (8, 16, 32, 64)
"""Sizes of a selection at which predicted and real query are compared."""


class QualityRecorder:
    """Compares each predictor's query with the real one.

    Args:
        path: of the records; its folder exists.
        shape, digest, host, digests: as of :class:`StepEngine`.
        forecasts: by name.
        inputs: what they predict from.
        keep_tokens: decoded tokens whose layer inputs are kept; once there are that many, they are
            written to ``path`` with ``.npz`` behind it, in the form that `fit_correction` reads.
        model, weights: name and fingerprint of the model, for that file.
        ranks: as of :class:`StepEngine`; selections are those of all ranks, cosine and mass are of
            this rank's heads.
    """

    def __init__(
        self,
        path: str,
        *,
        shape: ModelShape,
        digest: DigestAxis,
        host: HostPages,
        digests: DigestPool,
        forecasts: Mapping[str, Forecast],
        inputs: LayerInputs,
        keep_tokens: int = 0,
        model: str = "",
        weights: str = "",
        ranks: Ranks | None = None,
    ) -> None:
        self._shape = shape
        self._digest = digest
        self._shared = None if ranks is None else SharedChoice(ranks, digest)
        self._host = host
        self._digests = digests
        self._forecasts = forecasts
        self._inputs = inputs
        self._file = open(path, "w", encoding="utf-8", buffering=1)  # a killed server leaves lines
        self._predicted: dict[int, dict[str, torch.Tensor]] = {}
        self._no_slots = torch.full((host.num_pages,), -1, dtype=torch.int32)
        forced = digest.sink_pages + digest.recent_pages
        self._forced = forced
        self._k_pages = tuple(k for k in K_PAGES if k > forced)
        about = {"version": INPUTS_VERSION, "model": model, "weights": weights}
        self._kept = KeptInputs(Path(path + ".npz"), shape.num_layers, keep_tokens, about)

    def layer_input(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> None:
        """Predict the next layer's query by every predictor."""
        target = layer + 1
        if target < self._shape.num_layers:
            self._predicted[target] = {
                name: forecast.query(layer, target, x, positions)
                for name, forecast in self._forecasts.items()
            }

    def attention(self, layer: int, step: int, q: torch.Tensor, batch: Batch) -> None:
        """Compare with the real query and write a line.

        Its fields, means over the rows of the step:
            step, layer, rows; pages: full pages of a row
            cosine: per predictor, between predicted and real query, mean over query heads
            at: per k, over the ``rows`` that have more than k full pages; selections have the forced
                pages, as in serving
                overlap: per predictor, share of the real query's selection that its own has too;
                    forced pages are not counted
                mass: per predictor and for ``real``, attention weight of the real query, mean over
                    query heads, that lies in the selected pages and the page being filled; ``best``:
                    in the k pages with most of it

        Layer 0, which nobody predicts, has only ``real`` and ``best``.

        Args:
            q: ``[B, HQ, D]`` fp32, real query after RoPE.
        """
        predicted = self._predicted.pop(layer, {})
        real = self._select(layer, q.contiguous(), batch)
        chosen = {name: self._select(layer, query, batch) for name, query in predicted.items()}
        cosine = {
            name: float(torch.cosine_similarity(query, q, dim=-1).mean())
            for name, query in predicted.items()
        }
        at: dict[str, dict[str, Any]] = {}
        n_full = batch.n_full.tolist()
        for row in range(len(q)):
            if n_full[row] <= self._k_pages[0]:
                continue
            pages = batch.table[row, : n_full[row]]
            mass, tail = self._mass(layer, q[row], pages, batch, row)
            by_page = dict(zip(pages.tolist(), mass.tolist(), strict=True))
            for k in self._k_pages:
                if n_full[row] > k:
                    sums = at.setdefault(str(k), {"rows": 0, "overlap": {}, "mass": {}})
                    cut = {name: pages[row, :k] for name, pages in chosen.items()}
                    self._add(sums, k, real[row, :k], cut, by_page, tail)
        for sums in at.values():
            for group in ("overlap", "mass"):
                sums[group] = {n: round(x / sums["rows"], 6) for n, x in sums[group].items()}
        line = {
            "step": step,
            "layer": layer,
            "rows": len(q),
            "pages": sum(n_full) / len(n_full),
            "cosine": {name: round(value, 6) for name, value in cosine.items()},
            "at": at,
        }
        self._file.write(json.dumps(line) + "\n")
        if layer == self._shape.num_layers - 1:
            self._kept.add(self._inputs)

    def _select(self, layer: int, query: torch.Tensor, batch: Batch) -> npt.NDArray[np.int32]:
        """``[B, largest k]``: its first k columns are what a selection of k pages has."""
        scores = self._digests.score(
            layer, query, batch.table, batch.n_full, self._shape.scale, self._digest.head_reduce
        )
        if self._shared is not None:
            scores = self._shared.scores(scores)
        return select_pages(
            scores,
            batch.table,
            batch.n_full,
            self._no_slots,
            self._k_pages[-1],
            self._digest.sink_pages,
            self._digest.recent_pages,
        ).pages.numpy()

    def _mass(
        self, layer: int, q: torch.Tensor, pages: torch.Tensor, batch: Batch, row: int
    ) -> tuple[torch.Tensor, float]:
        """Attention weight of every full page ``[N]`` and of the tail; they add up to 1."""
        shape, k = self._shape, self._host.k[layer]
        tail = k[int(batch.tail_page[row]), : int(batch.tail_len[row])]
        keys = torch.cat([k[pages.long()].flatten(0, 1), tail]).float()  # [T, H, D]
        grouped = q.view(shape.num_kv_heads, -1, shape.head_dim)
        logits = torch.einsum("hgd,thd->hgt", grouped, keys).flatten(0, 1) * shape.scale
        if shape.logit_cap:
            logits = shape.logit_cap * torch.tanh(logits / shape.logit_cap)
        weights = logits.softmax(-1).mean(0)  # over heads, as a page is chosen for all together
        full = len(pages) * shape.page_size
        return weights[:full].view(-1, shape.page_size).sum(1), float(weights[full:].sum())

    def _add(
        self,
        sums: dict[str, Any],
        k: int,
        real: npt.NDArray[np.int32],
        chosen: Mapping[str, npt.NDArray[np.int32]],
        by_page: Mapping[int, float],
        tail: float,
    ) -> None:
        """Add one row's overlap and mass at one k."""
        sums["rows"] += 1
        _count(sums["mass"], "best", tail + sum(sorted(by_page.values())[-k:]))
        _count(sums["mass"], "real", tail + sum(by_page[page] for page in real.tolist()))
        for name, pages in chosen.items():
            _count(sums["mass"], name, tail + sum(by_page[page] for page in pages.tolist()))
            common = len(set(pages.tolist()) & set(real.tolist())) - self._forced
            _count(sums["overlap"], name, common / (k - self._forced))

    def close(self) -> None:
        self._file.close()
        self._kept.write()


class KeptInputs:
    """The layer inputs of the first tokens that were decoded.

    The file has ``inputs`` ``[N, L, C]`` float32 and ``source`` ``[N]`` int64: the place of the same
    request's previous token, -1 if it is not there.

    Args:
        tokens: N, how many are kept; 0: none, and no file.
        about: goes into the file as it is.
    """

    def __init__(self, path: Path, num_layers: int, tokens: int, about: Mapping[str, Any]) -> None:
        self._path = path
        self._layers = range(num_layers)
        self._wanted = tokens
        self._about = dict(about)
        self._inputs: list[npt.NDArray[np.float32]] = []
        self._source: list[npt.NDArray[np.int64]] = []
        self._count = 0
        self._first = 0  # place of the first row of the step before

    def add(self, inputs: LayerInputs) -> None:
        """A step has ended."""
        if self._count >= self._wanted:
            return
        rows = torch.stack([inputs.now(layer) for layer in self._layers], dim=1)
        self._inputs.append(rows.float().cpu().numpy())
        self._source.append(np.where(inputs.source >= 0, inputs.source + self._first, -1))
        self._first, self._count = self._count, self._count + len(rows)
        if self._count >= self._wanted:
            self.write()

    def write(self) -> None:
        """Write what there is; later tokens are not kept."""
        if not self._inputs:
            return
        arrays = {"inputs": np.concatenate(self._inputs), "source": np.concatenate(self._source)}
        write_arrays(self._path, self._about, arrays)
        self._inputs, self._source, self._wanted = [], [], 0


def _count(totals: dict[str, float], name: str, value: float) -> None:
    totals[name] = totals.get(name, 0.0) + value
