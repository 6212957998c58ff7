"""The passes over what pages have been of use, in C++; in numpy: ``core/uses.py``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_scout import _native
from sglang_scout.core.uses import Flags, Floats, Ids, PageUses


class NativePageUses(PageUses):
    """As :class:`PageUses`, with the same results to the last bit.

    Raises:
        ValueError: in touch, protect and hottest, a page or layer out of range.
        TypeError: there, arrays of other dtypes than those named.
    """

    def count(self, pages: npt.NDArray[np.int32]) -> Ids:
        return _native.count_pages(pages)

    def _touch(self, layers: Ids, pages: npt.NDArray[np.int32], step: int, weights: Floats) -> None:
        _native.touch_pages(self.both, *self._of_slots, layers, pages, weights, step)

    def protect(self, pages: Ids, slot_of: npt.NDArray[np.int32], step: int) -> int:
        return _native.protect_pages(self.both, *self._of_slots, slot_of, pages, step)

    def coldest(self, counts: Ids, before_step: int, below: Floats) -> tuple[Ids, Ids, Floats]:
        return _native.coldest_slots(self.both, *self._of_slots, counts, before_step, below)

    def hottest(
        self,
        layers: Ids,
        missed: npt.NDArray[np.int32],
        counts: Flags,
        is_first: Flags,
        limit_pages: Ids,
    ) -> tuple[Ids, Ids]:
        return _native.hottest_pages(self.both, layers, missed, counts, is_first, limit_pages)
