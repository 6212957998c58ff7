"""The table of docs/results/README.md from the rows of benchmark/kernels/cpu_attention.py.

    python -m benchmark.kernels.attention_tables docs/results/cpu_attention.jsonl

Rates are for batch 64 and 64 pages. A ratio compares two rows of the same shape, size and number of threads: the
median of the ratios within a round of samples, which cancels fluctuations of the machine's memory bandwidth; over all
sizes a cell has the median and the range. "Best read" is the faster of the two read loops.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmark.rows import Row, markdown_table, read_rows

NAMES = ("native", "read-sequential", "read", "ipex", "vllm")
READS = ("read", "read-sequential")

Size = tuple[int, str, int, int]
"""Threads, models, batch, pages."""


class Measured:
    """The rows of one run by implementation. Raises ValueError for rows of another benchmark, or without ours."""

    def __init__(self, rows: Sequence[Row]) -> None:
        if not rows or rows[0]["benchmark"] != "cpu_attention":
            raise ValueError("has no rows of benchmark/kernels/cpu_attention.py")
        self._rows: dict[str, dict[Size, Row]] = {name: {} for name in NAMES}
        self.group: dict[str, int] = {}  # query heads per KV head, by models
        for row in rows:
            name = next((known for known in NAMES if row["impl"].startswith(known)), None)
            if row["status"] == "ok" and name is not None:
                size = (row["threads"], row["models"], row["batch"], row["pages"])
                self._rows[name][size] = row
                self.group[row["models"]] = row["G"]
        self.sizes = list(self._rows["native"])

    def gb_per_s(self, name: str, size: Size) -> float:
        """0 if not measured."""
        return self._rows[name].get(size, {}).get("gb_per_s", 0.0)

    def faster(self, theirs: str, size: Size) -> float | None:
        """Speed-up of ours: ratio of bytes per second."""
        a, b = (self._rows[name].get(size) for name in ("native", theirs))
        if a is None or b is None:
            return None
        us, their_us = (dict(zip(r["rounds"], r["samples_us"], strict=True)) for r in (a, b))
        ratios = [their_us[r] / us[r] for r in us.keys() & their_us.keys()]
        return median(ratios) if ratios else None

    def share(self, size: Size) -> float | None:
        """Share of the bandwidth of the faster read loop."""
        return min((x for x in (self.faster(read, size) for read in READS) if x), default=None)


def attention(measured: Measured) -> str:
    lines = []
    for models in sorted(measured.group, key=lambda x: (measured.group[x] == 1, measured.group[x])):
        group = measured.group[models]
        label = "MHA (G=1)" if group == 1 else f"{models.split(',')[0]} (G={group})"
        for threads in sorted({size[0] for size in measured.sizes}):
            at = (threads, models, 64, 64)
            rates = [measured.gb_per_s("native", at)]
            rates.append(max(measured.gb_per_s(read, at) for read in READS))
            sizes = [size for size in measured.sizes if size[:2] == (threads, models)]
            cells = [f"{x:.1f}" for x in rates] + [middle([measured.share(s) for s in sizes])]
            cells += [middle([measured.faster(x, s) for s in sizes]) for x in ("ipex", "vllm")]
            lines.append([label, str(threads), *cells])
    head = ["shape", "threads", "scout, GB/s", "best read, GB/s", "of the best read"]
    return markdown_table([*head, "to IPEX 2.8", "to vLLM"], lines)


def middle(values: Sequence[float | None]) -> str:
    found = [x for x in values if x]
    if not found:
        return "–"
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 64
    try:
        print(attention(Measured(read_rows(Path(argv[0])))))
    except (OSError, ValueError) as error:
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
