"""Tables of docs/results/README.md from the rows of benchmark/kernels/cpu_attention.py.

    python -m benchmark.kernels.attention_tables docs/results/cpu_attention.jsonl

Best instruction set, pages in huge pages. A ratio is of two rows of the same shape, size and number of threads: the
median of the ratios within a round of samples, so that a machine that gives now more memory bandwidth and now less does
not move what both sides take from it. Where fewer than three rounds have both, it is the ratio of the medians. "Best
read" is the faster of the two read loops. Over several sizes a table has the median and the range.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmark.rows import Row, read_rows

RIVALS = {
    "ipex-2.8": "IPEX 2.8",
    "vllm": "vLLM",
    "sgl-kernel": "`sgl-kernel`",
    "sdpa-gather": "torch SDPA with gather",
    "sdpa-gather-grouped": "torch SDPA, grouped",
}
VERSIONED = ("vllm", "sgl-kernel")
"""Rivals whose rows are named with what was built."""

READS = ("read", "read-sequential")

LARGE = (64, 64)
"""Batch and pages of the table of bandwidths."""

MIN_ROUNDS = 3

Size = tuple[int, str, int, int]
"""Threads, models, batch, pages."""


class Measured:
    """The rows of one run by what they measure."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """
        Raises:
            ValueError: they are of another benchmark, or nothing of ours was measured.
        """
        if not rows or rows[0]["benchmark"] != "cpu_attention":
            raise ValueError("has no rows of benchmark/kernels/cpu_attention.py")
        best_isa = rows[0]["native_best_isa"]
        self._rows: dict[str, dict[Size, Row]] = {}
        self.group: dict[str, int] = {}  # query heads a KV head, by models
        for row in rows:
            if row["status"] != "ok" or row["backing"] != "thp":
                continue
            if "rounds" not in row:
                raise ValueError("is of an older version: its rows do not say their rounds")
            name = row["impl"].removesuffix(f"-{best_isa}")
            name = next((rival for rival in VERSIONED if name.startswith(f"{rival}-")), name)
            size = (row["threads"], row["models"], row["batch"], row["pages"])
            self._rows.setdefault(name, {})[size] = row
            self.group[row["models"]] = row["G"]
        if "native" not in self._rows:
            raise ValueError("has no measured row of ours in huge pages")

    def sizes(self) -> list[Size]:
        return list(self._rows["native"])

    @property
    def large(self) -> tuple[int, int]:
        """Batch and pages that every shape has: LARGE, or what comes next to it in a quick run."""
        found = {size[2:] for size in self.sizes()}
        return LARGE if LARGE in found else max(found)

    def gb_per_s(self, name: str, size: Size) -> float | None:
        row = self._rows.get(name, {}).get(size)
        return None if row is None else row["gb_per_s"]

    def best_read(self, size: Size) -> float | None:
        found = [self.gb_per_s(name, size) for name in READS]
        return max((x for x in found if x), default=None)

    def faster(self, ours: str, theirs: str, size: Size) -> float | None:
        """How many times as many bytes a second one takes as the other."""
        a, b = (self._rows.get(name, {}).get(size) for name in (ours, theirs))
        if a is None or b is None:
            return None
        us, their_us = (dict(zip(r["rounds"], r["samples_us"], strict=True)) for r in (a, b))
        in_turns = [their_us[r] / us[r] for r in us.keys() & their_us.keys()]
        if len(in_turns) < MIN_ROUNDS:
            in_turns = [b["median_us"] / a["median_us"]]
        work = (a["gb_per_s"] * a["median_us"]) / (
            b["gb_per_s"] * b["median_us"]
        )  # of a call, ours to theirs
        return work * median(in_turns)

    def share(self, size: Size) -> float | None:
        """Of the faster read loop."""
        found = [self.faster("native", read, size) for read in READS]
        return min((x for x in found if x), default=None)

    def spread(self, threads: int) -> float:
        """Of the median kernel row on so many threads."""
        found = (row["spread"] for size, row in self._rows["native"].items() if size[0] == threads)
        return median(found)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", "---:", *["---"] * (len(head) - 2)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *lines)]


def shape_of(measured: Measured, models: str) -> str:
    group = measured.group[models]
    return "MHA (G=1)" if group == 1 else f"{models.split(',')[0]} (G={group})"


def bandwidths(measured: Measured) -> list[str]:
    """Of a large batch, in GB/s."""
    batch, pages = measured.large
    lines = []
    for threads, models in keys(measured, largest_first=True):
        size = (threads, models, batch, pages)
        found = [measured.gb_per_s(name, size) for name in ("native", "read")]
        found += [measured.best_read(size)]
        found += [measured.gb_per_s(name, size) for name in RIVALS]
        cells = ["–" if x is None else f"{x:.1f}" for x in found]
        lines.append([shape_of(measured, models), str(threads), *cells])
    head = ["shape", "threads", "ours", "read, same pages", "best read", *RIVALS.values()]
    return table(head, lines)


def ratios(measured: Measured) -> list[str]:
    """Of bytes a second to rivals and to the best read loop."""

    def column(theirs: str) -> Callable[[Size], float | None]:
        return lambda size: measured.faster("native", theirs, size)

    columns = {f"to {label}": column(name) for name, label in RIVALS.items()}
    columns["of the best read"] = measured.share
    lines = []
    for threads, models in keys(measured):
        sizes = [size for size in measured.sizes() if size[:2] == (threads, models)]
        cells = [middle([x for x in map(of, sizes) if x]) for of in columns.values()]
        lines.append([f"G={measured.group[models]}", str(threads), *cells])
    return table(["shape", "threads", *columns], lines)


def shares(measured: Measured) -> list[str]:
    """Of the best read loop with all threads, where a batch keeps all of them busy."""
    threads = max(size[0] for size in measured.sizes())
    wanted = sorted({s[2:] for s in measured.sizes() if s[2] >= 16 and s[3] >= 64})
    lines = []
    for models in shapes(measured):
        cells = []
        for batch, pages in wanted:
            size = (threads, models, batch, pages)
            found = measured.share(size)
            cells.append("–" if found is None else f"{100 * found:.0f} %")
        lines.append([shape_of(measured, models), str(threads), *cells])
    return table(["shape", "threads", *(f"batch {b}, {p} pages" for b, p in wanted)], lines)


def middle(found: Sequence[float]) -> str:
    if not found:
        return "–"
    digits = 2 if max(found) < 3 else 1 if max(found) < 20 else 0
    x, least, most = (f"{v:.{digits}f}" for v in (median(found), min(found), max(found)))
    return f"{x} ({least} to {most})"


def shapes(measured: Measured) -> list[str]:
    """In the order of the documents: grouped queries first."""
    return sorted(measured.group, key=lambda x: (measured.group[x] == 1, measured.group[x]))


def keys(measured: Measured, largest_first: bool = False) -> list[tuple[int, str]]:
    counts = sorted({size[0] for size in measured.sizes()}, reverse=largest_first)
    if largest_first:
        return [(threads, models) for threads in counts for models in shapes(measured)]
    return [(threads, models) for models in shapes(measured) for threads in counts]


def tables(measured: Measured) -> dict[str, list[str]]:
    """By what they hold: lines of Markdown."""
    return {
        "bandwidths": bandwidths(measured),
        "ratios": ratios(measured),
        "shares": shares(measured),
    }


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 64
    try:
        measured = Measured(read_rows(Path(argv[0])))
    except (OSError, ValueError) as error:
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return 1
    for name, lines in tables(measured).items():
        print(f"{name}\n\n" + "\n".join(lines) + "\n")
    for threads in sorted({size[0] for size in measured.sizes()}):
        print(f"spread with {threads} threads: {measured.spread(threads):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
