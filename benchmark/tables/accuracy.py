"""Tables of docs/results/accuracy.md."""

from __future__ import annotations

from functools import partial
from statistics import fmean

from benchmark.accuracy.study.table import token_mean
from benchmark.rows import Row, markdown_table
from benchmark.tables import find, number, one
from benchmark.tables.study import DEFAULT, PAPER, SERVER, Column, study

BUDGETS = (256, 512, 1024, 2048)
NATS = ("right", "nats", "prompt", "prompt nats")
FACTS = ("right", "lost", "prompt", "prompt lost")
BY_BUDGET = {
    **{f"`scout`, {x:,}": f"rotated-2 {x} {DEFAULT}" for x in BUDGETS},
    **{f"Quest's bounds, {x:,}": f"minmax-32 {x} grain=head" for x in BUDGETS},
    **{f"the paper's choices, {x:,}": f"study.jsonl: minmax-32 {x} {PAPER}" for x in BUDGETS[2:]},
}
BY_HEAD = DEFAULT.replace("query", "grain=head query")
GRAINS = {
    label: setting
    for x in BUDGETS[1:]
    for label, setting in (
        (f"`scout`, {x:,}", f"study_budgets.jsonl: rotated-2 {x} {DEFAULT}"),
        (f"`scout` per KV head, {x:,}", f"rotated-2 {x} {BY_HEAD}"),
        (f"the paper's choices, {x:,}", f"minmax-32 {x} {PAPER}"),
        (f"the paper's choices per KV head, {x:,}", f"minmax-32 {x} grain=head {PAPER}"),
        (f"bounds, real query, {x:,}", f"minmax-32 {x}"),
        (
            f"bounds, real query, per KV head, {x:,}",
            f"study_budgets.jsonl: minmax-32 {x} grain=head",
        ),
    )
    if label != "`scout` per KV head, 2,048"
}
"""One choice of pages for all heads of a layer, or one per KV head."""
SELECTION = {
    "the keys themselves": "keys 512",
    "two bits": "rotated-2 512",
    "two bits, budget 1,024": "rotated-2 1024",
    "two bits, a choice per KV head": "rotated-2 512 grain=head",
    "two bits, pages of 16": "rotated-2 512 page_tokens=16",
    "two bits, pages of 64": "rotated-2 512 page_tokens=64",
    "one bit": "rotated-1 512",
    "bounds": "minmax-32 512",
    "bounds, budget 1,024": "minmax-32 1024",
    "bounds, pages of 16": "minmax-16 512 page_tokens=16",
    "two bits, selected by the predicted query": "rotated-2 512 query=predicted",
}
CORRECTED = "rotated-2 512 query=predicted attends=corrected-missing"
ATTENTION = {
    "the predicted query, 512": f"rotated-2 512 {PAPER}",
    "corrected for each page, 512": CORRECTED,
    **{f"re-weighted, {x:,}": f"rotated-2 {x} {SERVER}" for x in BUDGETS[1:]},
    **{
        f"re-weighted, by values, {x:,}": f"study_values.jsonl: rotated-2 {x} {DEFAULT}"
        for x in BUDGETS[1:3]
    },
}
DROPPED = {
    "the default": f"rotated-2 1024 {DEFAULT}",
    "pages scored at every second token": f"rotated-2 1024 {DEFAULT} score_every=2",
    "at every fourth": f"rotated-2 1024 {DEFAULT} score_every=4",
    "`calibrated` digests: one bit, for one model": f"calibrated 1024 {DEFAULT}",
}
POLICIES = {
    "`minmax`, predicted query": "scout",
    "`minmax`, real query": "scout-real-query",
    "first and newest pages": "recent",
}


def _kl(found: list[Row]) -> str:
    return number(token_mean("kl")(found), 4)


def queries() -> str:
    """The paper's Table 1, and what the 16 pages hold that the predicted query selects."""
    names = ("overlap", "mass", "mass_real", "mass_best")
    lines = []
    for label, first, last in (("1", 1, 1), ("2", 2, 2), ("3 to 29", 3, 29), ("all", 1, 29)):
        layers = [one("real_model_predicted_query.jsonl", layer=x) for x in range(first, last + 1)]
        values = [fmean(x["cosine"] for x in layers)]
        values += [fmean(x["at"]["16"][name] for x in layers) for name in names]
        lines.append([label, *(number(x, 2) for x in values)])
    heads = ["layers", "cosine", "overlap", "mass: predicted", "real", "best possible"]
    return markdown_table(heads, lines)


def asked(file: str, policy: str, budget: int | None, length: int, name: str = "right") -> int:
    """Sum over the tasks of the suite."""
    found = find(file, policy=policy, budget_tokens=budget, length_tokens=length)
    return sum(row[name] for row in found)


def servers() -> str:
    lines = []
    for policy, budget in (
        ("full", None),
        *((p, b) for b in (1024, 2048) for p in ("scout", "quest")),
    ):
        label = f"`{policy}`, {budget:,}" if budget else "full attention"
        counts = [asked("real_model.jsonl", policy, budget, x) for x in (2048, 4096)]
        lines.append([label, *map(str, counts)])
    return markdown_table(["right of 8", "2,048 tokens", "4,096 tokens"], lines)


def retrieval() -> str:
    lengths = (2048, 4096, 8192, 16384)
    lines = []
    for label, policy in POLICIES.items():
        counts = [
            [
                [asked("accuracy.jsonl", policy, b, x, y) for y in ("right", "asked")]
                for b in BUDGETS
            ]
            for x in lengths
        ]
        lines.append([label, *(" ".join(f"{100 * r / n:.0f}" for r, n in by) for by in counts)])
    return markdown_table(["percent right", *(f"{x:,}" for x in lengths)], lines)


TABLES = {
    "budgets": partial(study, "study_budgets.jsonl", BY_BUDGET, FACTS, full=True),
    "servers": servers,
    "grains": partial(study, "study.jsonl", GRAINS, NATS, full=True),
    "selection": partial(
        study, "study.jsonl", SELECTION, ("right", "lost", "prompt", "kl"), full=True
    ),
    "missing": partial(study, "study_weights.jsonl", ATTENTION, NATS, full=True),
    "dropped": partial(
        study,
        "study_scores.jsonl",
        DROPPED,
        (*NATS, Column("KL of text", "text", _kl)),
    ),
    "queries": queries,
    "retrieval": retrieval,
}
