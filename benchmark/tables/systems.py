"""Tables of docs/results/systems.md."""

from __future__ import annotations

from functools import partial
from math import exp
from statistics import fmean, median

from benchmark.rows import markdown_table
from benchmark.tables import extremes, find, number
from benchmark.tables.accuracy import asked
from benchmark.tables.study import PAPER, SERVER, study

STUDY = {
    "`scout`": f"rotated-2 1024 {SERVER}",
    "`scout` as in its paper": f"minmax-32 1024 {PAPER}",
    "`infinigen`, rotated digests": "rotated-2 1024 query=predicted",
    "`infinigen`, minimum and maximum": "minmax-32 1024 query=predicted",
    "`sparda`": "window 1024 grain=head query=forecast",
    "`sparda`, projection for its forecast": "window 1024 grain=head query=predicted",
    "`rheo`": "pilot 1024 grain=head",
}
SERVERS = {
    "`scout`": "scout-rotated",
    "`scout`, minimum and maximum": "scout",
    "`infinigen`, rotated digests": "infinigen",
    "`hgca`, window 256, at most 256 kept": "hgca",
    "`sparda`": "sparda",
    "`rheo`": "rheo",
}
LAYERS, KV_HEADS, HEAD_PAGE_BYTES = 30, 3, 2 * 32 * 64 * 4
"""SmolLM2-135M's, and the bytes of a page of one KV head in float32."""
PER_HEAD = ("sparda", "rheo")


def servers(file: str) -> str:
    """One request at a time; means of a step, of pages also of a layer."""
    lines = []
    for label, policy in SERVERS.items():
        found = find(file, policy=policy)
        steps = sum(row["offload"]["steps"] for row in found)
        total = {
            key: sum(row["offload"].get(key, 0) for row in found) for key in found[0]["offload"]
        }
        pages = steps * LAYERS
        fetched = total["fetched_pages"] * HEAD_PAGE_BYTES * (1 if policy in PER_HEAD else KV_HEADS)
        moved = total["recall_bytes"] + fetched
        cells = [number(total[x] / pages, 1) for x in ("cpu_pages", "fetched_pages")]
        cells += [number(moved / steps / 2**20, 2), number(total["gpu_wait_us"] / steps / 1e3, 1)]
        lines.append([label, str(asked(file, policy, 512, 2048)), *cells])
    heads = ["system, budget 512", "right of 8", "CPU pages", "fetched pages", "MiB copied"]
    return markdown_table([*heads, "ms waited"], lines)


def hgca() -> str:
    """The paper's Table 1."""
    betas = (0.25, 0.5, 0.75, 1.0)
    lines = []
    for ratio in (0.25, 0.5, 0.75):
        cells = []
        for beta in betas:
            found = find("hgca.jsonl", gpu_ratio=ratio, beta=beta)
            change = [100 * (exp(x["nats"] - x["full_nats"]) - 1) for x in found]
            kept = fmean(x["kept"] for x in found)
            cells.append(f"{extremes(change, 2)} % · {100 * kept:.0f} %")
        lines.append([number(ratio, 2), *cells])
    return markdown_table(["GPU ratio", *(f"β = {beta:g}" for beta in betas)], lines)


def hgca_heads(layer: int = 15) -> list[float]:
    """Figure 4: percent of the tokens that hold 99 % of a head's attention: least, median, most of a layer."""
    found = [x for row in find("hgca.jsonl", beta=0.0) for x in [row["entries_by_layer"][layer]]]
    least, middle, most = zip(*found, strict=True)
    return [100 * x for x in (min(least), median(middle), max(most))]


TABLES = {
    "systems": partial(
        study,
        "study_systems.jsonl",
        STUDY,
        ("right", "text", "kl", "mass"),
        full=True,
        first="system, budget 1,024",
    ),
    "systems-servers": partial(servers, "systems_smollm2.jsonl"),
    "hgca": hgca,
}
