"""The part of docs/results/accuracy.md that is made of the rows of perplexity.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmark.accuracy.policies import FULL, PLAIN
from benchmark.rows import Row


def perplexity_section(
    rows: Iterable[Row], table: Callable[[Sequence[str], Iterable[Sequence[str]]], str]
) -> list[str]:
    """Paragraphs; none without rows. Raises ValueError for rows that do not belong together."""
    mine = [row for row in rows if row["benchmark"] == "perplexity" and row["status"] == "ok"]
    if not mine:
        return []
    same = ("model", "weights", "dtype", "seed", "length_tokens", "forced_tokens", "texts")
    for name in same:
        if len({str(row[name]) for row in mine}) > 1:
            raise ValueError(f"perplexity rows differ in {name}: one table each")
    first = mine[0]
    full = next((row for row in mine if row["policy"] == FULL), None)
    lines = []
    for row in mine:
        label = PLAIN[row["policy"]]
        label += f", {row['budget_tokens']}" if row["budget_tokens"] else ""
        cells = [label]
        for which in ("answer", "other"):
            cells.append(f"{row[which]['perplexity']:.4f}")
            change = row[which]["nats"] - full[which]["nats"] if full else None
            cells.append("–" if change is None or row is full else f"{change:+.4f}")
        ratio = row["cpu_compute_ratio"]
        lines.append([*cells, "–" if ratio is None else f"{ratio:.3f}"])
    head = ["policy, budget", "answers", "nats against full", "other tokens", "nats against full"]
    gap = (full or {}).get("reference_gap_nats")
    text = (
        f"{first['texts']} texts of {first['length_tokens']} tokens; the last "
        f"{first['forced_tokens']} of each are forced on the decode server, {first['answer']['tokens']} "
        f"tokens of answers and {first['other']['tokens']} others in all. An answer can be looked up in "
        "the text, the other tokens are mostly the words of questions, which cannot."
    )
    if gap is not None:
        text += (
            " No token's log-probability under full attention differs from that of a plain float32 "
            f"forward pass by more than {gap:.4f} nats."
        )
    return [
        "## Perplexity, teacher-forced through the decode path",
        text,
        table([*head, "CPU compute ratio"], lines),
    ]
