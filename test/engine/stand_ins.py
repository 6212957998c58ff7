"""What stands in for CPU attention, and for a link whose copies end when a test says so."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import torch

from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.ops.attend import attend_pages_reference


class HereInstead:
    """Stands in for the worker with the reference op, and records its posts."""

    def __init__(self, shape: ModelShape, host: HostPages) -> None:
        self.shape, self.host = shape, host
        self.asked: list[tuple[int, np.ndarray]] = []
        self.queries: dict[int, torch.Tensor] = {}

    def post(self, layer, step, q, pages, n_pages):
        self.asked.append((layer, pages.copy()))
        self.queries[layer] = torch.from_numpy(q.copy())
        return layer, self.queries[layer], pages.copy(), n_pages.copy()

    def wait(self, ticket, out, lse):
        layer, q, pages, n_pages = ticket
        assert (np.sum(pages >= 0, axis=1) == n_pages).all()
        of = self.host.k[layer], self.host.v[layer], torch.from_numpy(pages)
        got, got_lse = attend_pages_reference(q, *of, None, None, self.shape.scale)
        out[:], lse[:] = got.numpy(), got_lse.numpy()
        return SimpleNamespace(waited_us=1.0, fallback_pages=0)


class SlowLink:
    """Replaces the copy thread of ``engine/recall.py``; copies stay in flight until :meth:`run`."""

    def __init__(self):
        self.waiting = []  # copies and what they run, in order
        self.forced = 0  # copies that were waited for

    def submit(self, function, *args):
        copy = Future()

        def exception(timeout=None):
            while timeout is None and not copy.done():  # an unbounded wait
                self.forced += 1
                self.run(1)
            return Future.exception(copy, 0)

        copy.exception = exception
        self.waiting.append((copy, function, args))
        return copy

    def run(self, copies: int) -> None:
        """The link completes ``copies`` copies, in order."""
        for _ in range(min(copies, len(self.waiting))):
            copy, function, args = self.waiting.pop(0)
            copy.set_result(function(*args))

    def shutdown(self, wait=True):
        self.run(len(self.waiting))


def with_slow_link(worker) -> SlowLink:
    """Give a ``MiniWorker`` a slow link and zero patience."""
    worker.engine.recall.close()
    link = worker.engine.recall._side = SlowLink()
    residency = worker.engine.parts.policy.residency
    if residency.patience_us is not None:
        residency.patience_us = 0.0
    return link
