"""The settings that the study compares, by set and part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmark.accuracy.study.selection import Setting

TWO_BITS, ONE_BIT, BOUNDS = "rotated-2", "rotated-1", "minmax-32"


def _paper(budget: int) -> Setting:
    """ScoutAttention's design: Quest's digests, predicted queries, which also attend to the missing pages."""
    return Setting(budget, query="predicted", attends="predicted-missing")


def _ahead(**more: object) -> Setting:
    return Setting(512, TWO_BITS, **{"query": "predicted", **more})  # type: ignore[arg-type]


DIGESTS = [
    *(Setting(512, x) for x in ("keys", TWO_BITS, ONE_BIT, "mean-8", "mean-32", "pca-16", BOUNDS)),
    *(Setting(256, x) for x in (TWO_BITS, BOUNDS)),
    *(Setting(1024, x) for x in (TWO_BITS, BOUNDS)),
    Setting(2048, BOUNDS),
]
"""One selection for all heads, by the real query."""

QUERIES = [
    _ahead(),
    _ahead(query="extrapolated"),
    _ahead(exact_layers=(1, 2)),
    *(_ahead(attends=x) for x in ("predicted-missing", "corrected-missing")),
    _ahead(exact_layers=(1, 2), attends="corrected-missing"),
    _paper(1024),
    _paper(2048),
]
HEADS = [
    *(Setting(512, TWO_BITS, reduce=x) for x in ("max", "sum")),
    Setting(512, TWO_BITS, grain="head"),
]
PAGES = [Setting(512, x, page_tokens=s) for s in (16, 64) for x in (TWO_BITS, f"minmax-{s}")]
TEXT = [
    *(Setting(512, x) for x in ("keys", TWO_BITS, ONE_BIT, BOUNDS)),
    _ahead(attends="corrected-missing"),
    _paper(1024),
]

PROMPT = [
    *(Setting(256, x) for x in (TWO_BITS, BOUNDS)),
    *(Setting(512, x) for x in ("keys", TWO_BITS, ONE_BIT, BOUNDS)),
    *(_ahead(attends=x) for x in ("predicted-missing", "corrected-missing")),
    _ahead(query="extrapolated", attends="corrected-missing"),
    *(Setting(1024, x) for x in (TWO_BITS, BOUNDS)),
    _paper(1024),
    _paper(2048),
]
"""With the question in the prompt, as in a chat."""

SHARES = [
    Setting(512, TWO_BITS),
    *(
        _ahead(attends=x, far=share)
        for share in (0.05, 0.12, 0.5, 1.0)
        for x in ("predicted", "reweighed")
    ),
]
"""Share of the selection computed with predicted queries, as if on the CPU."""

WEIGHTS = [_ahead(attends=f"{x}-missing") for x in ("predicted", "corrected", "reweighed")]
"""How the results of predicted queries are weighted in the merge."""


def _system(budget: int, mass: float = 1.0, **more: object) -> Setting:
    """The design of ``--kv-offload scout``."""
    how = {"query": "predicted", "attends": "reweighed-missing", "reduce": "value", **more}
    return Setting(budget, TWO_BITS, stop_mass=mass, **how)  # type: ignore[arg-type]


MASS = [
    *(_system(budget) for budget in (1024, 2048)),
    *(_system(1024, mass) for mass in (0.9, 0.95, 0.98)),
    _system(2048, 0.95),
]
"""Budgets, and page counts per layer and token limited by the mass that digests estimate."""

BYTES = [
    setting
    for budget in (128, 256, 512, 1024, 2048)
    for setting in (
        *(Setting(budget, x) for x in ("keys", TWO_BITS, ONE_BIT, BOUNDS, "pca-16")),
        Setting(budget, "minmax-16", page_tokens=16),
        Setting(budget, TWO_BITS, reduce="value"),
        Setting(budget, "mean-32", grain="head"),
        _paper(budget),
        _system(budget),
    )
]
"""Loss against bytes: the oracle, digests of 32 and 16 tokens a page, selection per head as in SparDA, two systems."""

LIMITS = [
    *(Setting(512, "keys", **how) for how in ({}, {"grain": "head"}, {"page_tokens": 16})),  # type: ignore[arg-type]
    *(_system(512, grain=grain) for grain in ("layer", "head")),
    Setting(1024, "keys"),
    *(_system(1024, grain=grain) for grain in ("layer", "head")),
]
"""Loss of the best selection of whole pages, per layer or per KV head, and of ours."""

VALUES = [
    setting
    for how in ({"reduce": "mass"}, {"reduce": "value"})
    for setting in (
        *(Setting(512, x, **how) for x in ("keys", TWO_BITS)),  # type: ignore[arg-type]
        *(_system(budget, **how) for budget in (512, 1024)),
    )
]
"""Pages ranked by mass, and by mass times value norms."""

SCORES = [
    *(_system(1024, score_every=n) for n in (1, 2, 3, 4)),
    replace(_system(1024), digest="calibrated"),
]
"""Pages ranked by scores of earlier tokens; one calibrated bit per channel instead of two rotated ones."""

BUDGETS = [
    setting
    for budget in (256, 512, 1024, 2048)
    for setting in (_system(budget), Setting(budget, BOUNDS, grain="head"))
]
"""The default of ``--kv-offload scout``; Quest's bounds with the real query and a choice per KV head. Quest itself has
pages of 16, a choice per query head, and full attention in the first two layers."""

LENGTHS = [_system(budget, exact_layers=(1,)) for budget in (512, 1024)]
"""For the retrieval model, by ``--length``."""

SYSTEMS = [
    setting
    for budget in (512, 1024)
    for setting in (
        _system(budget),
        _paper(budget),
        Setting(budget, TWO_BITS, query="predicted", reduce="value"),
        Setting(budget, BOUNDS, query="predicted"),
        Setting(budget, "window", query="forecast", grain="head"),
        Setting(budget, "window", query="predicted", grain="head"),
        Setting(budget, "pilot", grain="head"),
    )
]
"""scout, scout as in the paper, InfiniGen with either digest, SparDA with its forecast or with the next layer's
projection instead, RheoServe."""

FP8 = ("float8_e4m3fn", "float8_e5m2")
KV = [Setting(kv=x) for x in ("bfloat16", *FP8, *(f"rotated {x}" for x in FP8))]
"""Full attention over rounded keys and values."""

SETS: dict[str, dict[str, Sequence[Setting]]] = {
    "main": {"facts": [*DIGESTS, *QUERIES, *HEADS, *PAGES], "prompt": PROMPT, "text": TEXT},
    "weights": {
        "facts": [*WEIGHTS, *MASS[:2]],
        "prompt": [*WEIGHTS, *SHARES, *MASS],
        "text": [*WEIGHTS, *MASS[:2]],
    },
    "bytes": {"text": BYTES},
    "limits": dict.fromkeys(("facts", "prompt", "text"), LIMITS),
    "values": dict.fromkeys(("facts", "prompt", "text"), VALUES),
    "scores": dict.fromkeys(("facts", "prompt", "text"), SCORES),
    "budgets": dict.fromkeys(("facts", "prompt"), BUDGETS),
    "lengths": {"facts": LENGTHS},
    "kv": {"facts": KV, "text": KV},
    "systems": dict.fromkeys(("facts", "prompt", "text"), SYSTEMS),
    "short": {"facts": [Setting(512, TWO_BITS), Setting(512)], "text": [Setting(512, TWO_BITS)]},
}
