"""Tables of docs/results/accuracy.md."""

from __future__ import annotations

from functools import partial
from statistics import fmean

from benchmark.accuracy.study.table import token_mean
from benchmark.rows import Row, markdown_table
from benchmark.tables import find, number, one
from benchmark.tables.study import DEFAULT, PAPER, Column, mean, of, right, study

SMOLLM2_KV_HEADS = 3
BUDGETS = (256, 512, 1024, 2048)
NATS = ("right", "nats", "prompt", "prompt nats")
FACTS = ("right", "lost", "nats", "prompt", "prompt lost", "prompt nats")
BY_HEAD = "grain=head query"
BY_BUDGET = {
    **{f"`scout`, {x:,}": f"study_budgets.jsonl: rotated-2 {x} {DEFAULT}" for x in BUDGETS},
    **{
        f"per KV head: `scout`, {x:,}": f"rotated-2 {x} {DEFAULT.replace('query', BY_HEAD)}"
        for x in BUDGETS[:3]
    },
    **{f"the paper's choices, {x:,}": f"minmax-32 {x} {PAPER}" for x in BUDGETS[1:]},
    **{
        f"per KV head: the paper's choices, {x:,}": f"minmax-32 {x} grain=head {PAPER}"
        for x in BUDGETS[1:]
    },
    **{f"Quest's bounds, {x:,}": f"study_budgets.jsonl: minmax-32 {x} grain=head" for x in BUDGETS},
    **{f"one choice for all heads: bounds, {x:,}": f"minmax-32 {x}" for x in BUDGETS[1:]},
}
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
MISSING = {
    "the predicted query, 512": f"rotated-2 512 {DEFAULT} reweigh=0.0",
    "half re-weighted, 512": f"rotated-2 512 {DEFAULT} reweigh=0.5",
    "three quarters, 512": f"rotated-2 512 {DEFAULT} reweigh=0.75",
    "re-weighted, 512": f"rotated-2 512 {DEFAULT}",
    "half re-weighted, 1,024": f"rotated-2 1024 {DEFAULT} reweigh=0.5",
    "re-weighted, 1,024: the default": f"rotated-2 1024 {DEFAULT}",
    "the same, pages stay for 4 steps": f"rotated-2 1024 {DEFAULT} resident_steps=4",
    **{
        f"the paper's choices, {x:,}, pages stay for {n} steps": f"minmax-32 {x} {PAPER} resident_steps={n}"
        for x in BUDGETS[2:]
        for n in (4, 16)
    },
}
DROPPED = {
    "the default": f"rotated-2 1024 {DEFAULT}",
    "pages scored at every second token": f"rotated-2 1024 {DEFAULT} score_every=2",
    "at every fourth": f"rotated-2 1024 {DEFAULT} score_every=4",
    "`calibrated` digests: one bit, for one model": f"calibrated 1024 {DEFAULT}",
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


def grains() -> str:
    """Pages of a whole layer: those of one KV head count a third."""
    lines = []
    for label, is_head, budget in (
        ("one choice for all heads, 512", False, 512),
        ("one per KV head, 512", True, 512),
        ("one choice for all heads, 1,024", False, 1024),
    ):
        how, file, policy = DEFAULT, "study_budgets.jsonl", "scout-rotated"
        if is_head:
            how, file, policy = (
                DEFAULT.replace("query", BY_HEAD),
                "study.jsonl",
                f"{policy}+grain=head",
            )
        name = f"rotated-2 {budget} {how}"
        cells = [right(of(file, name, part)) for part in ("facts", "prompt")]
        of_text = of("study_scores.jsonl" if budget == 1024 else "study.jsonl", name, "text")
        cells.append(mean("nats", "full_nats")(of_text[:1]))
        cells.append(str(sum(asked("servers.jsonl", policy, budget, x) for x in (2048, 4096))))
        setting = {"setting": "head" if is_head else "default", "budget_tokens": budget}
        row = one("recall.jsonl", recall="adaptive", **setting)
        count = SMOLLM2_KV_HEADS if is_head else 1
        cells += [number(row[x] / count) for x in ("selected_pages", "cpu_pages")]
        cells.append(number(row["recall_bytes"] / 2**20, 1))
        lines.append([label, *cells, number(row["cpu_us"] / 1e3, 1)])
    heads = [
        "",
        "right, decoded",
        "in prompt",
        "nats a token",
        "on servers, of 16",
        "selected pages",
    ]
    return markdown_table([*heads, "on the CPU", "MiB recalled", "CPU ms"], lines)


def reweighing() -> str:
    """The digests' estimate of how the missing pages' log mass changes, beside the true change."""
    found = [
        row
        for setting in (f"rotated-2 {x} {DEFAULT}" for x in BUDGETS[1:3])
        for row in find("study_missing.jsonl", setting=setting)
    ]
    lines = []
    for label, first, last in (("1", 1, 1), ("2", 2, 2), ("3 to 10", 3, 10), ("11 to 29", 11, 29)):
        layers = [layer for row in found for layer in row["changes"][first : last + 1]]
        weight, change, error, product, square = map(sum, zip(*layers, strict=True))
        values = change / weight, error / weight, product / square
        lines.append([label, *(number(x, 2) for x in values)])
    return markdown_table(["layers", "true change", "error of the estimate", "slope"], lines)


def asked(file: str, policy: str, budget: int | None, length: int, name: str = "right") -> int:
    """Sum over the tasks of the suite."""
    found = find(file, policy=policy, budget_tokens=budget, length_tokens=length)
    return sum(row[name] for row in found)


SERVERS = {
    "full attention": ("full", None),
    "`scout`, 512": ("scout-rotated", 512),
    "`scout`, 1,024": ("scout-rotated", 1024),
    "per KV head: `scout`, 512": ("scout-rotated+grain=head", 512),
    "the paper's set-up, 1,024": ("paper", 1024),
    "the paper's set-up, 2,048": ("paper", 2048),
}


def servers() -> str:
    lines = []
    for label, (policy, budget) in SERVERS.items():
        counts = (asked("servers.jsonl", policy, budget, x) for x in (2048, 4096))
        lines.append([label, *map(str, counts)])
    return markdown_table(["right of 8", "2,048 tokens", "4,096 tokens"], lines)


TABLES = {
    "budgets": partial(study, "study.jsonl", BY_BUDGET, FACTS, full=True),
    "servers": servers,
    "selection": partial(
        study, "study.jsonl", SELECTION, ("right", "lost", "prompt", "kl"), full=True
    ),
    "missing": partial(study, "study_missing.jsonl", MISSING, ("cpu", *NATS), full=True),
    "grains": grains,
    "reweighing": reweighing,
    "dropped": partial(
        study,
        "study_scores.jsonl",
        DROPPED,
        (*NATS, Column("KL of text", "text", _kl)),
    ),
    "queries": queries,
}
