"""The settings that the study compares, by set and part."""

from __future__ import annotations

from collections.abc import Sequence

from benchmark.accuracy.study.selection import Setting

TWO_BITS, ONE_BIT, BOUNDS = "rotated-2", "rotated-1", "minmax-32"


def _paper(budget: int) -> Setting:
    """ScoutAttention's choices: Quest's digests, predicted queries, which also attend to what is missing."""
    return Setting(budget, query="predicted", attends="predicted-missing")


def _ahead(**more: object) -> Setting:
    return Setting(512, TWO_BITS, **{"query": "predicted", **more})  # type: ignore[arg-type]


DIGESTS = [
    *(Setting(512, x) for x in ("keys", TWO_BITS, ONE_BIT, "mean-8", "mean-32", "pca-16", BOUNDS)),
    *(Setting(256, x) for x in (TWO_BITS, BOUNDS)),
    *(Setting(1024, x) for x in (TWO_BITS, BOUNDS)),
    Setting(2048, BOUNDS),
]
"""One choice for all heads, by the real query."""

QUERIES = [
    _ahead(),
    _ahead(query="extrapolated"),
    _ahead(exact_layers=(1, 2)),
    *(_ahead(attends=x) for x in ("predicted-missing", "corrected-missing", "reweighed-missing")),
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
    *(_ahead(attends=x) for x in ("corrected-missing", "reweighed-missing")),
    _paper(1024),
]

PROMPT = [
    *(Setting(256, x) for x in (TWO_BITS, BOUNDS)),
    *(Setting(512, x) for x in ("keys", TWO_BITS, ONE_BIT, BOUNDS)),
    *(_ahead(attends=x) for x in ("predicted-missing", "corrected-missing", "reweighed-missing")),
    _ahead(query="extrapolated", attends="corrected-missing"),
    *(Setting(1024, x) for x in (TWO_BITS, BOUNDS)),
    _paper(1024),
    _paper(2048),
]
"""With the question in the prompt, as in a chat."""

SETS: dict[str, dict[str, Sequence[Setting]]] = {
    "main": {"facts": [*DIGESTS, *QUERIES, *HEADS, *PAGES], "prompt": PROMPT, "text": TEXT},
    "short": {"facts": [Setting(512, TWO_BITS), Setting(512)], "text": [Setting(512, TWO_BITS)]},
}
