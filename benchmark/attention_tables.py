"""Tables of docs/results/README.md from the rows of benchmark/cpu_attention.py.

    python benchmark/attention_tables.py docs/results/cpu_attention.jsonl

Best instruction set, pages in huge pages. A ratio is of two rows of the same size and number of threads: the median of
the ratios within a round of samples, which a machine that gives now more and now less does not move. "Best read" is
the faster of the two read loops. Over several sizes a table has the median and the range.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from rows import Row, read_rows

RIVALS = {
    "ipex-2.8": "IPEX 2.8",
    "vllm": "vLLM",
    "sgl-kernel": "`sgl-kernel`",
    "sdpa-gather": "torch SDPA with gather",
}
VERSIONED = ("vllm", "sgl-kernel")
"""Rivals whose rows are named with what was built."""

READS = ("read", "read-sequential")

LARGE = (64, 64)
"""Batch and pages of the table of bandwidths."""

Size = tuple[int, int, int, int]
"""Threads, query heads a KV head, batch, pages."""


class Measured:
    """The rows of one run by what they measure."""

    def __init__(self, rows: Sequence[Row]) -> None:
        best_isa = rows[0]["native_best_isa"]
        self._rows: dict[str, dict[Size, Row]] = {}
        self.models: dict[int, str] = {}
        for row in rows:
            if row["status"] != "ok" or row["backing"] != "thp":
                continue
            name = row["impl"].removesuffix(f"-{best_isa}")
            name = next((rival for rival in VERSIONED if name.startswith(f"{rival}-")), name)
            size = (row["threads"], row["G"], row["batch"], row["pages"])
            self._rows.setdefault(name, {})[size] = row
            self.models.setdefault(row["G"], row["models"])

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

    def faster(self, ours: str, theirs: str, size: Size, of: str = "gb_per_s") -> float | None:
        """How many times as many bytes, or tokens, a second one takes as the other."""
        a, b = (self._rows.get(name, {}).get(size) for name in (ours, theirs))
        if a is None or b is None:
            return None
        us, their_us = (dict(zip(r["rounds"], r["samples_us"], strict=True)) for r in (a, b))
        in_turns = [their_us[r] / us[r] for r in us.keys() & their_us.keys()]
        work = (a[of] * a["median_us"]) / (b[of] * b["median_us"])  # of a call, ours to theirs
        return work * median(in_turns) if in_turns else None

    def share(self, name: str, size: Size) -> float | None:
        """Of the faster read loop."""
        found = [self.faster(name, read, size) for read in READS]
        return min((x for x in found if x), default=None)

    def spread(self, threads: int) -> float:
        """Of the median kernel row on so many threads."""
        found = (row["spread"] for size, row in self._rows["native"].items() if size[0] == threads)
        return median(found)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", "---:", *["---"] * (len(head) - 2)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *lines)]


def shape_of(measured: Measured, group: int) -> str:
    models = measured.models[group].split(",")[0]
    return "MHA (G=1)" if group == 1 else f"{models} (G={group})"


def bandwidths(measured: Measured) -> list[str]:
    """Of a large batch, in GB/s."""
    batch, pages = measured.large
    lines = []
    for threads, group in keys(measured, largest_first=True):
        size = (threads, group, batch, pages)
        found = [measured.gb_per_s(name, size) for name in ("native", "native-int8", "read")]
        found += [measured.best_read(size)]
        found += [measured.gb_per_s(name, size) for name in RIVALS]
        cells = ["–" if x is None else f"{x:.1f}" for x in found]
        lines.append([shape_of(measured, group), str(threads), *cells])
    head = ["shape", "threads", "bf16", "int8", "read, same pages", "best read", *RIVALS.values()]
    return table(head, lines)


def ratios(measured: Measured) -> list[str]:
    """Of bytes a second to rivals, of int8's tokens a second, and to the best read loop."""

    def column(ours: str, theirs: str, of: str) -> Callable[[Size], float | None]:
        return lambda size: measured.faster(ours, theirs, size, of)

    columns = {f"to {label}": column("native", name, "gb_per_s") for name, label in RIVALS.items()}
    columns["int8 tokens to bf16"] = column("native-int8", "native", "tokens_per_s")
    columns["int8 tokens to IPEX"] = column("native-int8", "ipex-2.8", "tokens_per_s")
    columns["of the best read"] = lambda size: measured.share("native", size)
    lines = []
    for threads, group in keys(measured):
        sizes = [size for size in measured.sizes() if size[:2] == (threads, group)]
        cells = [middle([x for x in map(of, sizes) if x]) for of in columns.values()]
        lines.append([f"G={group}", str(threads), *cells])
    return table(["shape", "threads", *columns], lines)


def shares(measured: Measured) -> list[str]:
    """Of the best read loop with all threads, bf16 and int8, where a batch keeps all of them busy."""
    threads = max(size[0] for size in measured.sizes())
    wanted = sorted({s[2:] for s in measured.sizes() if s[2] >= 16 and s[3] >= 64})
    lines = []
    for group in groups(measured):
        cells = []
        for batch, pages in wanted:
            size = (threads, group, batch, pages)
            found = [measured.share(name, size) for name in ("native", "native-int8")]
            cells.append(", ".join("–" if x is None else f"{100 * x:.0f} %" for x in found))
        lines.append([shape_of(measured, group), str(threads), *cells])
    return table(["shape", "threads", *(f"batch {b}, {p} pages" for b, p in wanted)], lines)


def middle(found: Sequence[float]) -> str:
    if not found:
        return "–"
    digits = 2 if max(found) < 3 else 1 if max(found) < 20 else 0
    x, least, most = (f"{v:.{digits}f}" for v in (median(found), min(found), max(found)))
    return f"{x} ({least} to {most})"


def groups(measured: Measured) -> list[int]:
    """In the order of the documents: grouped queries first."""
    return sorted(measured.models, key=lambda group: (group == 1, group))


def keys(measured: Measured, largest_first: bool = False) -> list[tuple[int, int]]:
    counts = sorted({size[0] for size in measured.sizes()}, reverse=largest_first)
    if largest_first:
        return [(threads, group) for threads in counts for group in groups(measured)]
    return [(threads, group) for group in groups(measured) for threads in counts]


def tables(path: Path) -> dict[str, list[str]]:
    """By what they hold: lines of Markdown."""
    measured = Measured(read_rows(path))
    return {
        "bandwidths": bandwidths(measured),
        "ratios": ratios(measured),
        "shares": shares(measured),
    }


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 64
    for name, lines in tables(Path(argv[0])).items():
        print(f"{name}\n\n" + "\n".join(lines) + "\n")
    measured = Measured(read_rows(Path(argv[0])))
    for threads in sorted({size[0] for size in measured.sizes()}):
        print(f"spread with {threads} threads: {measured.spread(threads):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
