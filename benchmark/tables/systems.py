"""Tables of docs/results/systems.md."""

from __future__ import annotations

import re
from functools import partial

from benchmark.accuracy import hgca
from benchmark.accuracy.study.table import systems_table
from benchmark.decode import rheo_plan
from benchmark.kernels import page_scores
from benchmark.rows import markdown_table
from benchmark.tables import find, number, rows
from benchmark.tables.accuracy import asked

SERVERS = {
    "`scout`": "scout-rotated",
    "`infinigen`, rotated digests": "infinigen",
    "`hgca`, window 256, at most 256 kept": "hgca",
    "`hgca`, window 256": "hgca+context_cap_tokens=null",
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


TABLES = {
    "systems": lambda: systems_table(rows("study_systems.jsonl")),
    "systems-servers": partial(servers, "systems_prompt.jsonl"),
    "hgca": lambda: re.sub(r"-(?=\d)", "−", hgca.table_1(rows("hgca.jsonl"))),
    "hgca-heads": lambda: hgca.figure_4(rows("hgca.jsonl")),
    "page-scores": lambda: page_scores.table(rows("page_scores_systems.jsonl")),
    "rheo-plan": lambda: rheo_plan.table(rows("rheo_plan.jsonl")),
}
