"""Tables of docs/results/README.md from the rows of benchmark/kernels/cpu_attention.py.

    python -m benchmark.kernels.attention_tables docs/results/cpu_attention.jsonl

Best instruction set, pages in huge pages. A ratio is of two rows of the same shape, size and number of threads: the
median of the ratios within a round of samples, so that a machine that gives now more memory bandwidth and now less does
not move what both sides take from it. Where fewer than three rounds have both, it is the ratio of the medians. "Best
read" is the faster of the two read loops. Over several sizes a table has the median and the range.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmark.accuracy.table import markdown_table
from benchmark.rows import Row, read_rows

BASELINES = {
    "ipex-2.8": "IPEX 2.8",
    "vllm": "vLLM",
    "sgl-kernel": "`sgl-kernel`",
    "sdpa-gather": "torch SDPA with gather",
    "sdpa-gather-grouped": "torch SDPA, grouped",
}
VERSIONED = ("vllm", "sgl-kernel")
"""Baselines whose rows are named with what was built."""
READS = ("read", "read-sequential")
MIN_ROUNDS = 3

Size = tuple[int, str, int, int]
"""Threads, models, batch, pages."""


class Measured:
    """The rows of one run by what they measure. Raises ValueError for rows of another benchmark, or none of ours."""

    def __init__(self, rows: Sequence[Row]) -> None:
        if not rows or rows[0]["benchmark"] != "cpu_attention":
            raise ValueError("has no rows of benchmark/kernels/cpu_attention.py")
        best_isa = rows[0]["native_best_isa"]
        self._rows: dict[str, dict[Size, Row]] = {}
        self.group: dict[str, int] = {}  # query heads a KV head, by models
        for row in rows:
            if row["status"] != "ok" or row["backing"] != "thp":
                continue
            name = row["impl"].removesuffix(f"-{best_isa}")
            name = next((known for known in VERSIONED if name.startswith(f"{known}-")), name)
            size = (row["threads"], row["models"], row["batch"], row["pages"])
            self._rows.setdefault(name, {})[size] = row
            self.group[row["models"]] = row["G"]
        if "native" not in self._rows:
            raise ValueError("has no measured row of ours in huge pages")
        self.sizes = list(self._rows["native"])

    def gb_per_s(self, name: str, size: Size) -> float | None:
        row = self._rows.get(name, {}).get(size)
        return None if row is None else row["gb_per_s"]

    def best_read(self, size: Size) -> float | None:
        return max((x for x in (self.gb_per_s(name, size) for name in READS) if x), default=None)

    def faster(self, theirs: str, size: Size) -> float | None:
        """How many times as many bytes a second ours takes."""
        a, b = (self._rows.get(name, {}).get(size) for name in ("native", theirs))
        if a is None or b is None:
            return None
        us, their_us = (dict(zip(r["rounds"], r["samples_us"], strict=True)) for r in (a, b))
        in_turns = [their_us[r] / us[r] for r in us.keys() & their_us.keys()]
        if len(in_turns) < MIN_ROUNDS:
            in_turns = [b["median_us"] / a["median_us"]]
        # Bytes of a call, ours to theirs.
        work = (a["gb_per_s"] * a["median_us"]) / (b["gb_per_s"] * b["median_us"])
        return work * median(in_turns)

    def share(self, size: Size) -> float | None:
        """Of the faster read loop."""
        return min((x for x in (self.faster(read, size) for read in READS) if x), default=None)

    def models(self) -> list[str]:
        """In the order of the documents: grouped queries first."""
        return sorted(self.group, key=lambda x: (self.group[x] == 1, self.group[x]))

    def label(self, models: str) -> str:
        group = self.group[models]
        return "MHA (G=1)" if group == 1 else f"{models.split(',')[0]} (G={group})"


def bandwidths(measured: Measured) -> str:
    """Of batch 64 and 64 pages, in GB/s."""
    lines = []
    for threads in sorted({size[0] for size in measured.sizes}, reverse=True):
        for models in measured.models():
            size = (threads, models, 64, 64)
            found = [measured.gb_per_s(name, size) for name in ("native", "read")]
            found += [measured.best_read(size)]
            found += [measured.gb_per_s(name, size) for name in BASELINES]
            cells = ["–" if x is None else f"{x:.1f}" for x in found]
            lines.append([measured.label(models), str(threads), *cells])
    head = ["shape", "threads", "ours", "read, same pages", "best read", *BASELINES.values()]
    return markdown_table(head, lines)


def ratios(measured: Measured) -> str:
    """Of bytes a second to baselines and to the best read loop."""
    lines = []
    for models in measured.models():
        for threads in sorted({size[0] for size in measured.sizes}):
            sizes = [size for size in measured.sizes if size[:2] == (threads, models)]
            cells = [middle([measured.faster(name, s) for s in sizes]) for name in BASELINES]
            cells.append(middle([measured.share(s) for s in sizes]))
            lines.append([f"G={measured.group[models]}", str(threads), *cells])
    heads = [f"to {label}" for label in BASELINES.values()]
    return markdown_table(["shape", "threads", *heads, "of the best read"], lines)


def shares(measured: Measured) -> str:
    """Of the best read loop with all threads, where a batch keeps all of them busy."""
    threads = max(size[0] for size in measured.sizes)
    wanted = sorted({s[2:] for s in measured.sizes if s[2] >= 16 and s[3] >= 64})
    lines = []
    for models in measured.models():
        found = [measured.share((threads, models, *size)) for size in wanted]
        cells = ["–" if x is None else f"{100 * x:.0f} %" for x in found]
        lines.append([measured.label(models), str(threads), *cells])
    return markdown_table(
        ["shape", "threads", *(f"batch {b}, {p} pages" for b, p in wanted)], lines
    )


def middle(values: Sequence[float | None]) -> str:
    found = [x for x in values if x]
    if not found:
        return "–"
    digits = 2 if max(found) < 3 else 1 if max(found) < 20 else 0
    x, least, most = (f"{v:.{digits}f}" for v in (median(found), min(found), max(found)))
    return f"{x} ({least} to {most})"


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 64
    try:
        measured = Measured(read_rows(Path(argv[0])))
    except (OSError, ValueError) as error:
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return 1
    for table in (bandwidths, ratios, shares):
        print(f"{table.__name__}\n\n{table(measured)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
