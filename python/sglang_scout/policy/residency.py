"""Residency axis: important pages stay, recalled periodically and asynchronously (paper section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ImportantPages:
    """Pages selected most recently stay; each layer recalls what it misses at its own interval.

    Args:
        intervals: steps between two recalls, per layer; 0 = never.
        enabled: False switches recall off altogether (the paper's ablation without periodic recall).
    """

    intervals: tuple[int, ...]
    enabled: bool = True

    def due(self, layer: int, step: int) -> bool:
        # The layer number shifts the phase, so that equal intervals do not make all layers copy
        # in the same step and burst on the link.
        interval = self.intervals[layer]
        return self.enabled and interval > 0 and (step + layer) % interval == 0

    def recall_fresh(self) -> bool:
        # A request arrives with an empty device cache. Without this it would compute its whole
        # budget on the CPU until its layers' turns come. It happens with recall off too: the paper's
        # curve without recall (Figure 6a) also starts from the pages found important after prefill.
        return True

    def warm_columns(self, n_full: int, quota_pages: int) -> npt.NDArray[np.int64]:
        # What fits is loaded whole, and attention is then exact from the first token on. A longer
        # request gets its pages after its first selection has said which ones matter.
        return np.arange(n_full if n_full <= quota_pages else 0, dtype=np.int64)
