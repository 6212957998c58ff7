"""Markdown tables of the rows of suite.py, with 95 % intervals; those of losses are from paired comparisons.

python -m benchmark.accuracy.table FILE.jsonl --out FILE.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmark.accuracy.policies import FULL, PLAIN, Setting, plain
from benchmark.accuracy.scoring import Loss, paired_loss, wilson_interval
from benchmark.rows import Row, argument_parser, markdown_table, read_rows

COUNTED = ("cpu_pages", "fetched_pages", "recalled_pages", "gpu_wait_us")


class Scores:
    """Rows of one run of the suite, indexed by setting, length and task.

    Raises ValueError for rows of different models, seeds or question modes, and for duplicate rows.
    """

    same = ("model", "weights", "dtype", "seed", "through", "config")

    def __init__(self, rows: Iterable[Row]) -> None:
        rows = [r for r in rows if r["benchmark"] == "accuracy" and r["status"] == "ok"]
        if not rows:
            raise ValueError("no measured rows of the accuracy suite; run suite.py first")
        for name in self.same:
            if len(values := {str(row[name]) for row in rows}) > 1:
                shown = ", ".join(sorted(values))
                raise ValueError(f"rows differ in {name} ({shown}): one table each")
        self._found: dict[tuple[Setting, int, str], Row] = {}
        for row in rows:
            key = (Setting(row["policy"], row["budget_tokens"]), row["length_tokens"], row["task"])
            if key in self._found:
                raise ValueError(f"{key[0].name}, {key[1]} tokens, {key[2]} is there twice")
            self._found[key] = row
        settings, lengths, tasks = (set(x) for x in zip(*self._found, strict=True))
        order = list(PLAIN)
        self.settings = sorted(
            settings, key=lambda s: (order.index(s.base), s.policy, s.budget_tokens or 0)
        )
        self.policies = list(dict.fromkeys(s.policy for s in self.settings))
        self.budgets = sorted({s.budget_tokens for s in settings if s.budget_tokens})
        self.lengths, self.tasks = sorted(lengths), sorted(tasks)

    def of(self, setting: Setting, length: int) -> list[Row]:
        """One row per task."""
        found = (self._found.get((setting, length, task)) for task in self.tasks)
        return [row for row in found if row is not None]

    def mean(self, setting: Setting, length: int) -> tuple[float, float, float] | None:
        """Mean over the tasks with its 95 % interval, shares; None unless all tasks are there.

        The tasks have the same number of samples, so the mean is the share of all samples; the pooled
        interval is, if anything, too wide.
        """
        rows = self.of(setting, length)
        if len(rows) < len(self.tasks):
            return None
        right, total = sum(r["right"] for r in rows), sum(r["asked"] for r in rows)
        return (right / total, *wilson_interval(right, total))

    def loss(self, setting: Setting, length: int) -> Loss | None:
        """Loss against full, on the samples of all tasks; None if one of the two is missing."""
        both = self.of(Setting(FULL), length), self.of(setting, length)
        asked = [[r["asked"] for r in rows] for rows in both]
        if len(asked[0]) < len(self.tasks) or asked[0] != asked[1]:
            return None
        return paired_loss(*([x == "1" for r in rows for x in r["outcomes"]] for rows in both))


def share(value: float, low: float, high: float) -> str:
    return f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def by_budget(scores: Scores, length: int, cell: Callable[[Setting, int], str]) -> str:
    """A line per policy, a column per budget; missing entries are a dash."""
    lines = []
    for policy in scores.policies:
        if policy == FULL:
            text = cell(Setting(FULL), length)
            cells = [text] * len(scores.budgets) if text else []
        else:
            cells = [cell(Setting(policy, budget), length) for budget in scores.budgets]
        if any(x not in ("", "–") for x in cells):
            lines.append([plain(policy), *cells])
    return markdown_table(["policy", *(f"budget {b}" for b in scores.budgets)], lines)


def tables(scores: Scores) -> str:
    """Correct answers and losses by length, and what a step did."""

    def mean_cell(setting: Setting, length: int) -> str:
        found = scores.mean(setting, length)
        return share(*found) if found else "–"

    def loss_cell(setting: Setting, length: int) -> str:
        found = None if setting.policy == FULL else scores.loss(setting, length)
        if found is None:
            return "" if setting.policy == FULL else "–"
        low, high = found.interval_points
        return f"{found.points:.1f} ({low:.1f} to {high:.1f})"

    parts = ["## Right answers, mean of the tasks, percent"]
    for length in scores.lengths:
        parts += [f"### {length} tokens", by_budget(scores, length, mean_cell)]
    parts.append("## Loss against full attention, points")
    for length in scores.lengths:
        parts += [f"### {length} tokens", by_budget(scores, length, loss_cell)]
    parts += ["## A decode step", work(scores)]
    return "\n\n".join(parts) + "\n"


def work(scores: Scores) -> str:
    """What the servers did in a decode step, over all tasks. A page of `hgca`, `sparda`, `rheo` is one KV head's."""
    lines = []
    for setting in scores.settings:
        for length in scores.lengths:
            rows = [row for row in scores.of(setting, length) if row.get("offload")]
            if not rows:
                continue
            steps = sum(row["offload"]["steps"] for row in rows)
            each = [sum(row["offload"].get(key, 0) for row in rows) / steps for key in COUNTED]
            ratio = sum(row["cpu_compute_ratio"] for row in rows) / len(rows)
            name = f"{plain(setting.policy)}, {setting.budget_tokens}"
            lines.append([name, str(length), f"{ratio:.3f}", *(f"{x:.1f}" for x in each)])
    names = [name.replace("_", " ") for name in COUNTED]
    return markdown_table(["policy, budget", "tokens", "CPU share", *names], lines)


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    text = tables(Scores(row for path in args.files for row in read_rows(path)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
