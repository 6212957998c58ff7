"""Tables of docs/results/systems.md."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from math import exp
from pathlib import Path
from statistics import fmean, median

from benchmark.accuracy.planted import CUTS
from benchmark.decode.model import SIZES, write_config
from benchmark.rows import markdown_table
from benchmark.tables import extremes, find, number
from benchmark.tables.accuracy import asked
from benchmark.tables.study import PAPER, SERVER, after, study
from sglang_scout.cli.sizes import Plan, make_plan

STUDY = {
    "`scout`": f"rotated-2 {{}} {SERVER}",
    "`scout` as in its paper": f"minmax-32 {{}} {PAPER}",
    "`infinigen`, rotated digests": "rotated-2 {} query=predicted",
    "`infinigen`, minimum and maximum": "minmax-32 {} query=predicted",
    "`sparda`": "window {} grain=head query=forecast",
    "`sparda`, projection for its forecast": "window {} grain=head query=predicted",
    "`rheo`": "pilot {} grain=head",
}
LINES = {
    f"{label}, {budget:,}": setting.format(budget)
    for budget in (512, 1024)
    for label, setting in STUDY.items()
}
SERVERS = {
    "`scout`": "scout-rotated",
    "`scout`, minimum and maximum": "scout",
    "`infinigen`, rotated digests": "infinigen",
    "`hgca`, window 256, at most 256 kept": "hgca",
    "`sparda`": "sparda",
    "`rheo`": "rheo",
}
RETRIEVAL = {"full attention": "full", **dict(list(SERVERS.items())[:4])}
MEMORY = {
    "`scout`": ("scout", "{}", None),
    "`scout` as in its paper, 2,048": ("scout", '{"digest": "minmax"}', 2048),
    "`infinigen`": ("infinigen", "{}", None),
    "`hgca`": ("hgca", "{}", None),
}
LAYERS, KV_HEADS, HEAD_PAGE_BYTES = 30, 3, 2 * 32 * 64 * 4
"""SmolLM2-135M's, and the bytes of a page of one KV head in float32."""
PER_HEAD = ("sparda", "rheo")


def servers() -> str:
    """One request at a time; means of a step, of pages also of a layer."""
    lines = []
    for label, policy in SERVERS.items():
        found = find("systems_smollm2.jsonl", policy=policy)
        steps = sum(row["offload"]["steps"] for row in found)
        total = {
            key: sum(row["offload"].get(key, 0) for row in found) for key in found[0]["offload"]
        }
        pages = steps * LAYERS
        fetched = total["fetched_pages"] * HEAD_PAGE_BYTES * (1 if policy in PER_HEAD else KV_HEADS)
        moved = total["recall_bytes"] + fetched
        cells = [number(total[x] / pages, 1) for x in ("cpu_pages", "fetched_pages")]
        cells += [number(moved / steps / 2**20, 2), number(total["gpu_wait_us"] / steps / 1e3, 1)]
        lines.append([label, str(asked("systems_smollm2.jsonl", policy, 512, 2048)), *cells])
    heads = ["system, budget 512", "right of 8", "CPU pages", "fetched pages", "MiB copied"]
    return markdown_table([*heads, "ms waited"], lines)


def retrieval() -> str:
    counts = [
        asked("systems_recall.jsonl", policy, None if policy == "full" else 512, 4096)
        for policy in RETRIEVAL.values()
    ]
    return markdown_table(["", *RETRIEVAL], [["right of 42", *map(str, counts)]])


@cache
def plan(policy: str, config: str, budget: int | None) -> Plan:
    """Of Qwen3-8B, 65,536 tokens, 16 requests."""
    sizes = {"context_tokens": 65536, "requests": 16, "host_gib": 400, "budget_tokens": budget}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_config(SIZES["qwen3-8b"], Path(scratch) / "model", 65536)
        return make_plan(str(folder), policy=policy, config=config, **sizes)


def memory() -> str:
    """GB of GPU memory a request, by `sglang-scout plan`."""
    lines = []
    for label, (policy, config, budget) in MEMORY.items():
        of = plan(policy, config, budget).memory
        cells = [of.bytes_of(what) / 16e9 for what in ("digests", "resident slots")]
        lines.append([label, *(number(x, 2) for x in cells)])
    stock = plan("scout", "{}", None).server.kv_bytes_per_request / 1e9
    lines.append(["stock SGLang", "", number(stock, 2)])
    return markdown_table(["system", "digests", "pages"], lines)


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
        LINES,
        ("right", "text", "kl", "agree", "mass"),
        full=True,
        first="system, budget",
    ),
    "systems-lengths": partial(
        study,
        "study_systems.jsonl",
        {label: setting.format(1024) for label, setting in STUDY.items()},
        [after(cut) for cut in CUTS],
        first="system, budget 1,024",
    ),
    "systems-servers": servers,
    "systems-retrieval": retrieval,
    "systems-memory": memory,
    "hgca": hgca,
}
