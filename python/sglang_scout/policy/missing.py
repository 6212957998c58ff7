"""Missing-pages axis: the CPU worker attends to them where they lie (near-data computing, paper section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CpuAttention:
    on_cpu: bool = True
