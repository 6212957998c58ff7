"""Missing-pages axis: who attends to selected pages that are not on the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CpuAttention:
    """The CPU worker, where the pages lie (near-data computing, paper section 3.2)."""

    copy_ahead: bool = False


@dataclass(frozen=True)
class CopyAhead:
    """The device: the pages are copied to it before their layer needs them, as InfiniGen does.

    What finds no free slot is still left to the CPU worker, so that no selected page is skipped.
    """

    copy_ahead: bool = True
