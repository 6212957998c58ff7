"""A mini decode worker with HGCA that compares every step with the oracle's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import torch

from hgca_oracle import Oracle
from mini_worker import SIZE, MiniWorker
from sglang_scout.engine.stores import HostPages
from sglang_scout.ops.pages import LayerPages
from stand_ins import HereInstead

WINDOW = 96
LANDS_AFTER = 2
"""Steps if no boundary finds its work unfinished: evaluation started, lists exchanged."""


class PlainLists(HereInstead):
    """Stands in for the worker, list by list: host pages for one head, or context pages of it."""

    def wait(self, ticket, out, lse):
        layer, q, pages, n_pages = ticket
        q, out, lse = (x.reshape(len(pages), -1, *x.shape[2:]) for x in (q, out, lse))
        for row, (ids, count) in enumerate(zip(pages, n_pages, strict=True)):
            head, none = row % self.shape.num_kv_heads, torch.zeros(0, self.shape.head_dim)
            parts = [(none, none), *(self.of_head(layer, int(i), head) for i in ids[:count])]
            k, v = map(torch.cat, zip(*parts, strict=True))
            logits = q[row] @ k.T * self.shape.scale
            out[row] = (logits.softmax(1) @ v).numpy() if len(k) else 0
            lse[row] = logits.logsumexp(1).numpy() if len(k) else -np.inf
        return SimpleNamespace(waited_us=1.0, fallback_pages=0)

    def of_head(self, layer, page, head):
        if page < self.host.num_pages:
            return self.host.k[layer][page, :, head], self.host.v[layer][page, :, head]
        page, last = divmod(page - self.host.num_pages, SIZE)
        kept = self.host.context
        return kept.k[layer][page, : last + 1], kept.v[layer][page, : last + 1]


class HgcaWorker(MiniWorker):
    """With an oracle per request and layer, compared after every step."""

    def __init__(self, *, context_pages=300, **keys):
        self.keys, self.context_pages = keys, context_pages
        super().__init__(
            policy="hgca",
            budget_tokens=WINDOW,
            config=json.dumps(keys),
            pages=100,
            layers=2,
            around_missing=lambda missing: PlainLists(missing.shape, missing.host),
        )
        self.oracles = []

    def _make_host(self, pages):
        host = super()._make_host(pages)
        size = self.context_pages, SIZE, self.shape.head_dim
        context = [[torch.zeros(size) for _ in host.k] for _ in "kv"]
        flat = [[x.flatten(0, 1) for x in half] for half in (host.k, host.v)]
        return HostPages(self.shape, *flat, context=LayerPages.of(*context, "cpu"))

    def admit(self, length, asked=None, **kwargs):
        """``asked`` ``[L, HQ, D]``: queries of the prompt's last token, from the prefill server."""
        request = self.bring(length, **kwargs)
        full = np.array(request.pages[: length // SIZE], np.int64)
        self.engine.requests.arrive(request.slot, full, asked)
        self.join(request)
        ids = torch.tensor(request.pages)
        request.oracles = [
            Oracle(
                *(half[layer][ids].flatten(0, 1)[:length] for half in (self.host.k, self.host.v)),
                WINDOW,
                self.shape.scale,
                beta=self.keys.get("hgca_beta", 1.0),
                alpha=self.keys.get("hgca_alpha", 0.1),
                cap=self.keys.get("context_cap_tokens"),
                lands_after=LANDS_AFTER,
                asked=None if asked is None else asked[layer],
            )
            for layer in range(self.shape.num_layers)
        ]
        self.oracles += request.oracles
        return request

    def checked_step(self):
        outputs = self.step()
        for row, request in enumerate(self.requests):
            page, offset = divmod(request.length - 1, SIZE)
            for layer, oracle in enumerate(request.oracles):
                at = request.pages[page], offset
                new = self.host.k[layer][at], self.host.v[layer][at]
                expected = oracle.step(self.queries[layer][row], *new)
                assert not oracle.near, "a weight at its threshold: take another seed"
                found = outputs[layer][row].numpy()
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        self.engine.selector._thread.submit(int).result()

    def kept_of(self, request, layer, head):
        """The tokens of a list, as those of the oracle."""
        cache, kept = self.engine.selector._cache, self.older_of(request).kept
        _, _, tokens, _ = cache._entries(kept, np.array([layer * self.shape.num_kv_heads + head]))
        places = [request.pages.index(page) for page in tokens // SIZE]
        return set((np.array(places, int) * SIZE + tokens % SIZE).tolist())

    def older_of(self, request):
        return self.engine.selector._older[self.engine.requests._of_row[request.slot]]

    def _worker(self, missing):
        self.engine_missing = missing
        return missing
