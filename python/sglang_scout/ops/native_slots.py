"""What changes as pages get slots and lose them, in C++; in numpy: ``core/pages.py``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_scout import _native
from sglang_scout.core.pages import Reservation, ResidencyTable
from sglang_scout.core.uses import PageUses

Keys = npt.NDArray[np.int64]


class NativeResidencyTable(ResidencyTable):
    """As :class:`ResidencyTable`, with the same results in the same order.

    Raises:
        ValueError: where a page, layer or slot is out of range, or has no page that could go.
    """

    def __init__(self, uses: PageUses) -> None:
        super().__init__(uses)
        self._books = _native.PageSlots(
            uses=uses.both, slot_of=self.slot_of, is_pending=self._pending,
            generation=self._generation, page_of=uses.page_of, slot_heat=uses.slot_heat,
            slot_stamp=uses.slot_stamp, free=self._free, num_free=self._num_free,
        )  # fmt: skip

    def _absent(self, keys: Keys) -> Keys:
        return self._books.absent(keys)

    def _reserve(self, keys: Keys) -> Reservation:
        return Reservation(*self._books.reserve(keys))

    def _land(self, r: Reservation, step: int) -> Keys:
        return self._books.land(r.layers, r.pages, r.slots, r.generations, step)

    def _vacate(self, layers: Keys, slots: Keys) -> Keys:
        return self._books.vacate(layers, slots)
