"""Digest axis: how a page is summarised, and what its score decides.

The paper's choice is the channel-wise minimum and maximum of a page's keys (Quest; section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageDigest:
    """One digest per page and KV head, one score per page for all heads of a layer together."""

    form: str = "minmax"
    head_reduce: str = "mass"
    sink_pages: int = 1
    recent_pages: int = 1
    resident_bonus: float = 0.0
    only_selected: bool = False
