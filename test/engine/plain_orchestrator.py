"""The oracle of ``policy/history.py`` and of its use by the step boundary, page by page."""

import numpy as np

from mini_worker import SIZE
from ops.plain_residency import PlainResidency


class PlainOrchestrator:
    """Replays the boundaries of a ``MiniWorker``, given its steps' selections.

    Args:
        slots, period, pin_share: of each layer; steps between two exchanges; share of the slots.
    """

    def __init__(self, layers, pages, slots, budget, period, pin_share):
        self.table = PlainResidency(layers, pages, slots, half_life_steps=8.0)
        self.table.pin_share = pin_share
        self.budget, self.period = budget, period
        self.coming = []  # (reservation, whether a request has missed it)

    def boundary(self, step, requests, fresh, known):
        """``requests`` have the length of the step; ``fresh``: those of them that join with it."""
        table = self.table
        if known is not None:
            batch = known.launched.batch
            table.touch(table.every, known.pages, known.launched.step, batch.ages == 0)
        for taken, was_missed in self.coming:
            table.commit(taken, step - 1 if was_missed else -1)
        self.coming = []
        table.held_back = sum(self._opened(r) for r in requests)
        self._load_forced(step, requests, fresh)
        spare = [max(len(free) - table.held_back, 0) for free in table.free]
        self._fill(requests, spare)
        if known is not None:
            picked = [self._pick(layer, step, known.missing[layer], spare) for layer in table.every]
            self.coming.append((table.exchange(picked, known.launched.step), True))

    def _opened(self, request):
        """Pages that the request opens before every layer has had its exchange."""
        last = min(request.length + self.period, request.end_tokens)
        return sum(position % SIZE == 0 for position in range(request.length, last))

    def _load_forced(self, step, requests, fresh):
        forced, empty, warm = [], [], []
        for request in requests:
            full, pages = (request.length - 1) // SIZE, request.pages
            forced += [*pages[: min(full, 1)], *pages[max(full - 1, 0) : full], pages[full]]
            if request.length % SIZE == 1:
                empty.append(pages[full])
            if request in fresh:
                warm += pages[max(full - self.budget, 0) : full]
        self.table.touch_all_layers(self._ids(forced), step)
        self._load(empty, step, step)
        self._load(forced, step, step)
        if warm:
            self._load(forced + warm, step, step - 1, is_forced=False)

    def _load(self, pages, step, before_step, is_forced=True):
        table, pages = self.table, self._ids(pages)
        beside = 0 if is_forced else table.held_back
        wanted = [len(table._missing(layer, pages)) + beside for layer in table.every]
        table.evict(wanted, before_step, is_forced)
        table.commit(table.exchange([pages] * len(wanted), None, is_forced), step)

    def _fill(self, requests, spare):
        """If everything fits, pages are prefetched before any miss."""
        full = [page for r in requests for page in r.pages[: (r.length - 1) // SIZE]]
        if len(full) + len(requests) <= self.table.num_slots:
            absent = [self.table._missing(layer, self._ids(full)) for layer in self.table.every]
            first = [self._ids(a[:n]) for a, n in zip(absent, spare, strict=True)]
            self.coming.append((self.table.exchange(first, None, is_forced=True), False))

    def _pick(self, layer, step, missing, spare):
        score, stamp = self.table.frequency[layer], self.table.stamp[layer]
        if (step + layer) % self.period == 0:
            since = step - self.period - 2  # its selection was known at the last exchange
            return self._ids(
                [p for p, s in enumerate(score.tolist()) if s > 0 and stamp[p] > since]
            )
        missed = {int(page) for page in missing.flat if page >= 0}
        return self._ids(sorted(missed, key=lambda page: (-score[page], page))[: spare[layer]])

    @staticmethod
    def _ids(pages):
        return np.array(pages, np.int64)
