"""A stand-in for the copy thread of ``engine/recall.py`` that copies only on a test's request."""

from __future__ import annotations

from concurrent.futures import Future


class _Copy(Future):
    def __init__(self, link, work):
        super().__init__()
        self.link, self.work = link, work

    def exception(self, timeout=None):
        if timeout is None:  # an unbounded wait
            self.link.run_until(self)
        return super().exception(0)


class SlowLink:
    """Replaces a ``ThreadPoolExecutor``; copies stay in flight until :meth:`run`."""

    def __init__(self):
        self.waiting: list[_Copy] = []
        self.forced = 0  # copies that were waited for

    def submit(self, function, *args):
        copy = _Copy(self, lambda: function(*args))
        self.waiting.append(copy)
        return copy

    def run(self, copies: int) -> None:
        """The link completes ``copies`` copies, in order."""
        for _ in range(min(copies, len(self.waiting))):
            copy = self.waiting.pop(0)
            copy.set_result(copy.work())

    def run_until(self, copy: _Copy) -> None:
        while not copy.done():
            self.forced += 1
            self.run(1)

    def shutdown(self, wait=True):
        self.run(len(self.waiting))


def with_slow_link(worker) -> SlowLink:
    """Give a ``MiniWorker`` a slow link and zero patience."""
    worker.engine.recall.close()
    link = worker.engine.recall._side = SlowLink()
    if worker.engine.policy.residency.patience_us is not None:
        worker.engine.policy.residency.patience_us = 0.0
    return link
