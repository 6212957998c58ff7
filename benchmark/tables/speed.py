"""Tables of docs/results/cpu.md, recall.md, faults.md and predictions.md."""

from __future__ import annotations

from statistics import fmean, median

from benchmark.decode import paper_figures as figures
from benchmark.decode import predictions
from benchmark.rows import Row, markdown_table
from benchmark.tables import extremes, find, middle, number, one, rows

MACHINES = {
    "Zen 5, AVX-512": "cpu_attention.jsonl",
    "Zen 4, AVX-512": "cpu_attention_avx512.jsonl",
    "Zen 3, AVX2": "cpu_attention_fp8.jsonl",
}
GROUPS = {"G=4": (8, 4), "G=5": (8, 5), "G=8": (8, 8), "MHA": (32, 1)}
"""KV heads, query heads for each."""
READS = ("read", "read-sequential")
SIZE = ("threads", "H", "G", "batch", "pages")
H200_COMMIT = "d4e87d42b6472e3f3c7305c7230bca6f20f18cb6"
SCORES = ("page_scores.jsonl", "page_scores_avx512.jsonl", "page_scores_calibrated.jsonl")
ROUND_TRIPS = {
    "back to back, below the Python client": ("ring", 0),
    "back to back, through the client": ("client", 0),
    "attention process asleep, through the client": ("client", 1000),
}


def faster(ours: Row, theirs: Row) -> float:
    """Speed-up: the median of the ratios within a round, which cancels what slows the machine for both."""
    a, b = (dict(zip(x["rounds"], x["samples_us"], strict=True)) for x in (ours, theirs))
    return median(b[x] / a[x] for x in a.keys() & b.keys())


def pairs(file: str, theirs: str, ours: str = "native", **fields: object) -> list[tuple[Row, Row]]:
    """Rows of the same shape, size and number of threads: ours, and the one whose name begins so."""
    by_size = {tuple(x[y] for y in SIZE): x for x in rows(file) if x["impl"] == theirs}
    if not by_size:
        by_size = {tuple(x[y] for y in SIZE): x for x in rows(file) if x["impl"].startswith(theirs)}
    own = [x for x in find(file, **fields) if x["impl"].startswith(ours)]
    sizes = [tuple(x[y] for y in SIZE) for x in own]
    return [(x, by_size[size]) for x, size in zip(own, sizes, strict=True) if size in by_size]


def speed_ups(file: str, theirs: str, **fields: object) -> list[float]:
    return [faster(*pair) for pair in pairs(file, theirs, **fields)]


def of_read(file: str, **fields: object) -> list[float]:
    """Bandwidth relative to the faster of the two read loops."""
    both = [speed_ups(file, read, **fields) for read in READS]
    return [min(pair) for pair in zip(*both, strict=True)]


def shape(name: str) -> dict[str, int]:
    return dict(zip(("H", "G"), GROUPS[name], strict=True))


def cpu_attention() -> str:
    lines = []
    for group in GROUPS:
        two = {"threads": 2, **shape(group)}
        cells = [
            extremes((x for n in (16, 64) for x in of_read(file, batch=n, pages=64, **two)), 2)
            for file in MACHINES.values()
        ]
        cells += [
            middle(speed_ups("cpu_attention.jsonl", theirs, **two), 1)
            for theirs in ("ipex", "vllm")
        ]
        for machine in ("Zen 4, AVX-512", "Zen 3, AVX2"):
            found = pairs(MACHINES[machine], "native", "fp8_e4m3", pages=64, **shape(group))
            cells.append(extremes((faster(*pair) for pair in found if pair[0]["batch"] > 1), 1))
        lines.append([group, *cells])
    reads = [f"of a read: {machine.split(',')[0]}" for machine in MACHINES]
    return markdown_table(["", *reads, "to IPEX", "to vLLM", "e4m3: Zen 4", "Zen 3"], lines)


def scores() -> str:
    lines = []
    for (machine, _), file in zip(reversed(MACHINES.items()), SCORES, strict=True):
        least = one(file, impl="minmax")
        for row in rows(file):
            if row["impl"] != "minmax" and not row["impl"].startswith(("rotated-2", "calibrated")):
                continue
            more = row["digest_bytes"] / least["digest_bytes"]
            cells = [number(row["median_us"] / 1e3, 1), number(row["times_minmax"], 1)]
            cells += [number(row["gb_per_s"], 1), number(row["share_of_read"], 2)]
            lines.append([f"{machine}: `{row['impl']}`", number(more, 1), *cells])
    heads = ["machine: digest", "bytes of `minmax`'s", "ms", "time of `minmax`'s", "GB/s"]
    return markdown_table([*heads, "of a read loop"], lines)


def ring() -> str:
    lines = []
    for label, (impl, gap) in ROUND_TRIPS.items():
        row = one("ring_latency.jsonl", impl=impl, gap_us=gap)
        cells = [number(row["median_us"], 1), number(row["p99_us"], 1), number(row["max_us"])]
        lines.append([label, *cells])
    return markdown_table(["us", "median", "p99", "longest"], lines)


def figure_6() -> str:
    lines = []
    for setting, name, mode in (
        ("default", "the default", "adaptive"),
        ("paper", "the paper's set-up", "fixed"),
    ):
        for budget in (1024, 2048):
            of = {"setting": setting, "budget_tokens": budget}
            off, on = (one("recall.jsonl", recall=x, **of) for x in ("off", mode))
            every_step = sum(x == 1 for x in off["intervals"])
            cells = [number(off["ratio_by_step"][0], 2), number(off["ratio"], 2)]
            cells += [
                extremes(off["ratio_by_layer"], 2),
                f"{every_step} of {len(off['intervals'])}",
            ]
            cells += [number(fmean(off["intervals"]), 1), f"`{mode}`: {on['ratio']:.3f}"]
            lines.append([f"{name}, {budget:,}", *cells, number(on["recalled_pages"])])
    lines.append(["paper: Qwen3-8B", "under 0.15", "", "layers differ", "", "8.7", "0.082", ""])
    heads = ["without recall", "fourth step", "mean", "by layer", "interval 1", "mean interval"]
    return markdown_table([*heads, "with recall", "pages a step"], lines)


def soak() -> str:
    row = one("soak.jsonl")
    faults = row["faults"]
    bad = ("lost", "wrong", "leaked")
    lines = [
        ["requests answered; abandoned by their clients", f"{row['answered']:,}; {row['dropped']}"],
        [
            f"faults of {len(faults)} kinds; attention processes replaced",
            f"{sum(faults.values())}; {row['restarts']}",
        ],
        [
            "layers compared with full-precision attention; maximum error",
            f"{row['verify_checks']:,}; {row['verify_max_rel_error']:.1e}",
        ],
        [f"requests {', '.join(bad)}", ", ".join(str(len(row[x])) for x in bad)],
        ["longest time without a token, s", number(row["longest_stall_s"], 1)],
    ]
    return markdown_table(["what", "count"], lines)


def checksums() -> str:
    lines = []
    for pages in (8, 32):
        plain, sealed = (
            one("checksums.jsonl", impl=x, pages=pages) for x in ("attend", "attend-sealed")
        )
        lines.append([f"CPU attention, {pages} pages", *_compared(plain, sealed)])
    steps = [one("checksums.jsonl", impl=x) for x in ("step", "step-sealed")]
    return markdown_table(
        ["ms", "without", "with", "ratio"], [*lines, ["a step", *_compared(*steps)]]
    )


def _compared(plain: Row, sealed: Row) -> list[str]:
    both = [x["median_us"] for x in (plain, sealed)]
    return [*(number(x / 1e3, 1) for x in both), number(both[1] / both[0], 2)]


def steps_of(kv: str, context: int) -> tuple[Row, Row]:
    """Full attention (FlashInfer; of fp8 our kernel) and scout, on the H200 in one call, for the shape of Qwen3-14B."""
    found = find("gpu_h200.jsonl", kv=kv, context=context, commit=H200_COMMIT, model="qwen3-14b")
    full = max((x for x in found if x["impl"].startswith("full")), key=_rate)
    return full, next(x for x in found if x["impl"] == "scout" and x["cache"] == "device")


def h200() -> str:
    lines = []
    for kv, contexts in (("bfloat16", (65536, 32768, 16384)), ("float8_e4m3fn", (65536,))):
        for context in contexts:
            full, own = steps_of(kv, context)
            cells = [f"{number(_rate(x))} ({x['batch']})" for x in (full, own)]
            shares = [f"{100 * own[x]:.1f} %" for x in ("cpu_compute_ratio", "wait_share")]
            cells += [f"{_rate(own) / _rate(full):.2f}x", ", ".join(shares)]
            lines.append([f"{'bf16' if kv == 'bfloat16' else 'fp8'}, {context:,}", *cells])
    heads = ["KV, context", "full attention (batch)", "scout (batch)", "", "CPU share, wait"]
    return markdown_table(heads, lines)


def _rate(row: Row) -> float:
    return row["tokens_per_s"]


def paper_figures() -> str:
    return figures.table(rows("paper_figures.jsonl"))


def h100() -> str:
    return predictions.table(find("predictions.jsonl", impl="h100"))


TABLES = {
    x.__name__.replace("_", "-"): x
    for x in (
        cpu_attention,
        scores,
        ring,
        figure_6,
        soak,
        checksums,
        h200,
        h100,
        paper_figures,
    )
}
