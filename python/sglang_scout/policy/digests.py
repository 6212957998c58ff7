"""Digest axis: channel-wise minimum and maximum of a page's keys (Quest), the paper's choice (section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MinMaxDigest:
    """Quest bounds, one score per page for all KV heads of a layer together."""

    head_reduce: str = "mass"
    sink_pages: int = 1
    recent_pages: int = 1
    resident_bonus: float = 0.0
    only_selected: bool = False
