"""Plots of the study's rows: planted facts found by budget, or loss on plain text by the bytes read per decode step."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt

from benchmark.accuracy.planted import CUTS
from benchmark.accuracy.study.table import interval, paired, token_mean
from benchmark.rows import Row

HEAD_DIM = 64  # SmolLM2
VALUE_BYTES = 2  # K and V in bf16
LABELS = {
    ("keys", "layer", "real", "mass"): ("keys themselves (oracle, reads all of K)", "k", ":"),
    ("rotated-2", "layer", "real", "mass"): ("page mean, two rotated bits", "tab:cyan", "-"),
    ("rotated-2", "layer", "real", "value"): ("the same, and norms of values", "tab:green", "-"),
    ("rotated-1", "layer", "real", "mass"): ("page mean, one rotated bit", "tab:olive", "-"),
    ("minmax-32", "layer", "real", "mass"): ("bounds, pages of 32 (Quest)", "tab:orange", "-"),
    ("minmax-16", "layer", "real", "mass"): ("bounds, pages of 16 (Quest)", "tab:red", "-"),
    ("mean-32", "head", "real", "mass"): ("page mean, a choice for each KV head (as SparDA)", "tab:purple", "-"),
    ("pca-16", "layer", "real", "mass"): ("16 principal components in four bits", "tab:brown", "-"),
    ("minmax-32", "layer", "predicted-missing", "mass"): ("the paper: bounds, predicted queries", "tab:orange", "--"),
    ("rotated-2", "layer", "reweighed-missing", "value"): ("scout: these, predicted, re-weighted", "tab:green", "--"),
}  # fmt: skip
"""By digest, grain, attending query and reduction: label, colour and style of a line."""


def digest_bytes(name: str, page_tokens: int, head_dim: int = HEAD_DIM) -> float:
    """Bytes per page and KV head.

    Raises:
        ValueError: an unknown digest.
    """
    kind, _, number = name.partition("-")
    rows = page_tokens / int(number or 1)
    sizes = {
        "keys": page_tokens * head_dim * VALUE_BYTES,
        "mean": rows * head_dim * VALUE_BYTES,
        "minmax": 2 * rows * head_dim * VALUE_BYTES,
        # Codes, the mean in int8, steps, a scale and a norm for each token.
        "rotated": page_tokens * (int(number or 1) * head_dim / 8 + 3) + head_dim + 16,
        "pca": page_tokens * (int(number or 1) / 2 + VALUE_BYTES),
    }
    if kind not in sizes:
        raise ValueError(f"digest {name!r} is not known")
    return sizes[kind]


def share_read(rows: list[Row]) -> float:
    """Bytes read per step, digests and selected pages, as a share of all KV bytes; mean over windows."""
    first = rows[0]
    tokens = first["page_tokens"]
    page = 2 * tokens * HEAD_DIM * VALUE_BYTES
    pages = [
        (cut + n / 2) / tokens
        for row in rows
        for cut, n in zip(row["cut"], row["tokens"], strict=True)
    ]
    all_pages = sum(pages) / len(pages)
    chosen = sum(sum(row["pages_by_layer"]) / len(row["pages_by_layer"]) for row in rows) / len(
        rows
    )
    return (all_pages * digest_bytes(first["digest"], tokens) + chosen * page) / (all_pages * page)


def draw_study(rows: list[Row]) -> Any:
    """KL to full attention against the share of the KV bytes, a line for each method, a point for each budget."""
    lines: dict[tuple[str, ...], list[tuple[float, float, int]]] = {}
    by_setting = paired([row for row in rows if "pages_by_layer" in row], "text")
    if not by_setting:
        raise ValueError(
            "no rows of plain text that say how many pages were chosen; --set bytes makes some"
        )
    for own in by_setting.values():
        first = own[0]
        place = share_read(own), token_mean("kl")(own), first["budget_tokens"]
        if first["stop_mass"] == first["far"] == 1:
            line = tuple(first[name] for name in ("digest", "grain", "attends", "reduce"))
            lines.setdefault(line, []).append(place)
    fig, ax = plt.subplots(figsize=(10, 6.4))
    for key, (label, color, style) in LABELS.items():
        if key in lines:
            x, y, _ = zip(*sorted(lines[key], key=lambda place: place[2]), strict=True)
            ax.plot(x, y, style, color=color, marker="o", markersize=4, label=label)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="bytes read in a step, of those of all KV",
        ylabel="KL to full attention",
    )
    ax.grid(alpha=0.3, which="both")
    ax.legend(fontsize=8)
    documents = len(next(iter(by_setting.values())))
    budgets = sorted({budget for line in lines.values() for *_, budget in line})
    ax.set_title(
        f"{rows[0]['model']}: plain text, documents: {documents}; budgets {budgets[0]} to {budgets[-1]}",
        fontsize=11,
    )
    return fig


PANELS = {
    "prompt": "the question is in the prompt",
    "facts": "the question is decoded, token by token",
}
SYSTEMS = {
    "reweighed-missing": ("--kv-offload scout, default digest", "tab:green", "o"),
    "real": ("Quest's min/max bounds, pages of 32, a selection per KV head", "tab:orange", "^"),
}
"""By the attending query: label, colour and marker."""


def found(rows: list[Row], field: str = "right") -> float:
    """Percent of the numbers asked for that were answered correctly."""
    return 100 * sum(sum(map(sum, row[field])) for row in rows) / sum(
        len(x) for row in rows for x in row[field]
    )  # fmt: skip


def draw_budgets(rows: list[Row]) -> Any:
    """Planted numbers found, by budget: a panel for each form of the question, full attention as a line."""
    fig, axes = plt.subplots(1, len(PANELS), figsize=(10, 3.9), sharey=True)
    for (part, title), ax in zip(PANELS.items(), axes, strict=True):
        by_setting = paired(rows, part)
        full = next(iter(by_setting.values()))
        ax.axhline(found(full, "full_right"), color="k", linestyle=":", label="full attention")
        for attends, (label, color, marker) in SYSTEMS.items():
            own = [x for x in by_setting.values() if x[0]["attends"] == attends]
            budgets, means = [x[0]["budget_tokens"] for x in own], [found(x) for x in own]
            ax.plot(budgets, means, color=color, marker=marker, label=label)
            low, high = zip(*(interval(x, found) for x in own), strict=True)
            ax.fill_between(budgets, low, high, color=color, alpha=0.15, linewidth=0)
        ax.set_xscale("log", base=2)
        ax.set_xticks(budgets, [f"{x:,}" for x in budgets])
        ax.minorticks_off()
        ax.set(xlabel="budget, tokens", title=title, ylim=(0, 100))
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("planted numbers found, %")
    axes[0].legend(fontsize=8, loc="upper left")
    texts = f"{len(full)} texts, questions after {CUTS[0]:,} to {CUTS[-1]:,} tokens"
    fig.suptitle(f"{rows[0]['model']}, {texts}; bands: 95 % intervals over texts", fontsize=11)
    return fig
