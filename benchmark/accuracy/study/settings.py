"""The settings that the study compares, by set and part. Rows of earlier sets are in docs/results; their settings were
last in commit 56dce02."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmark.accuracy.study.selection import Setting

TWO_BITS, BOUNDS = "rotated-2", "minmax-32"


def _paper(budget: int, **more: Any) -> Setting:
    """ScoutAttention's design: Quest's digests, predicted queries, which also attend to the missing pages."""
    return Setting(budget, query="predicted", **{"attends": "predicted-missing", **more})


def _system(budget: int, digest: str = TWO_BITS, **more: Any) -> Setting:
    """The design of ``--kv-offload scout``."""
    how = {"query": "predicted", "attends": "reweighed-missing", "reduce": "value", **more}
    return Setting(budget, digest, **how)


MAIN = [
    *(_system(budget) for budget in (512, 1024, 2048)),
    *(_system(1024, page_tokens=size) for size in (16, 64)),
    _system(1024, BOUNDS, reduce="mass"),
    *(Setting(1024, digest, reduce="value") for digest in ("keys", TWO_BITS)),
    _paper(1024),
    _paper(2048),
]
"""Budgets, page sizes and digests of ``--kv-offload scout``; beside it the real query, with an oracle that
knows the keys, and the paper's choices."""

BUDGETS = [
    setting
    for budget in (256, 512, 1024, 2048)
    for setting in (_system(budget), Setting(budget, BOUNDS, grain="head"))
]
"""The default of ``--kv-offload scout``; Quest's bounds with the real query and a choice per KV head. Quest itself has
pages of 16, a choice per query head, and full attention in the first two layers."""

GRAIN = [
    setting
    for budget in (512, 1024, 2048)
    for setting in (
        _system(budget),
        *(_paper(budget, grain=grain) for grain in ("layer", "head")),
        *(Setting(budget, BOUNDS, grain=grain) for grain in ("layer", "head")),
    )
] + [_system(budget, grain="head") for budget in (256, 512, 1024)]
"""A choice of pages for all heads of a layer, or one per KV head: of the default, of the paper's choices, and of bounds
with the real query."""

MISSING = [
    *(_paper(budget, resident_steps=steps) for budget in (1024, 2048) for steps in (4, 16)),
    _system(1024, resident_steps=4),
    *(_system(512, reweigh=share) for share in (0.0, 0.5, 0.75, 1.0)),
    *(_system(1024, reweigh=share) for share in (0.5, 1.0)),
]
"""The paper's choices and the default with fewer pages attended to by the predicted query; and a part of the
re-weighting."""


def _by_head(digest: str, **more: Any) -> Callable[[int], Setting]:
    return lambda budget: Setting(budget, digest, grain="head", **more)


def _rheo(budgets: int) -> Callable[[int], Setting]:
    return lambda budget: _by_head("pilot", cache_tokens=budgets * budget)(budget)


SYSTEMS: dict[str, Callable[[int], Setting]] = {
    "`scout`": _system,
    "`scout` as in its paper": _paper,
    "`infinigen`, rotated digests": partial(_system, attends="real"),
    "`infinigen`, minimum and maximum": partial(_paper, attends="real"),
    "`sparda`": _by_head("window", query="forecast"),
    "`sparda`, real query (its Sparse)": _by_head("window", reduce="windows"),
    "`sparda`, next layer's projection": _by_head("window", reduce="windows", query="predicted"),
    "`rheo`, selected pages only": _rheo(0),
    "`rheo`, cache of one budget": _rheo(1),
    "`rheo`, cache of two budgets": _rheo(2),
}
"""By name, for a budget. The sparse attention that SparDA replaces selects by all query heads of a KV head; a cache is
RheoServe's of one request."""

OF_SYSTEMS = {make(budget): name for budget in (512, 1024) for name, make in SYSTEMS.items()}

SETS: dict[str, dict[str, Sequence[Setting]]] = {
    "main": dict.fromkeys(("facts", "prompt", "text"), MAIN),
    "budgets": dict.fromkeys(("facts", "prompt"), BUDGETS),
    "grain": {
        **dict.fromkeys(("facts", "prompt"), GRAIN),
        "text": [_system(512, grain=grain) for grain in ("layer", "head")],
    },
    "missing": dict.fromkeys(("facts", "prompt"), MISSING),
    "systems": dict.fromkeys(("facts", "prompt", "text"), [*OF_SYSTEMS]),
}
