"""Tables of the rows of suite.py, as Markdown.

python -m benchmark.accuracy.table docs/results/accuracy.jsonl --out FILE.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmark.accuracy.policies import FULL, NAMES, Setting, plain
from benchmark.accuracy.questions import SOURCES
from benchmark.accuracy.scoring import Loss, paired_loss, wilson_interval
from benchmark.rows import Row, markdown_table, read_rows

DETAIL_TOKENS = 8192


class Scores:
    """Rows of one run of the suite, found by setting, length and task.

    Raises ValueError for rows of different models, seeds or ways to ask, and for a row twice.
    """

    same = ("model", "weights", "dtype", "seed", "through", "config")

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = [r for r in rows if r["benchmark"] == "accuracy" and r["status"] == "ok"]
        if not self.rows:
            raise ValueError("no measured rows of the accuracy suite; run suite.py first")
        for name in self.same:
            values = {str(row[name]) for row in self.rows}
            if len(values) > 1:
                raise ValueError(
                    f"rows differ in {name} ({', '.join(sorted(values))}): one table each"
                )
        self._found: dict[tuple[Setting, int, str], Row] = {}
        for row in self.rows:
            key = (Setting(row["policy"], row["budget_tokens"]), row["length_tokens"], row["task"])
            old = self._found.get(key)
            if old is not None and old["asked"] == row["asked"]:
                raise ValueError(f"{key[0].name}, {key[1]} tokens, {key[2]} is there twice")
            if old is None or old["asked"] < row["asked"]:
                self._found[key] = row
        settings = {key[0] for key in self._found}
        self.settings = sorted(
            settings, key=lambda s: (NAMES.index(s.base), s.policy, s.budget_tokens or 0)
        )
        self.policies = list(dict.fromkeys(s.policy for s in self.settings))
        self.budgets = sorted({s.budget_tokens for s in settings if s.budget_tokens})
        self.lengths = sorted({key[1] for key in self._found})
        known = [task for source in SOURCES.values() for task in source.tasks]
        self.tasks = [t for t in known if any(key[2] == t for key in self._found)]

    def of(self, setting: Setting, length: int) -> list[Row]:
        """One row for each task that was asked."""
        found = (self._found.get((setting, length, task)) for task in self.tasks)
        return [row for row in found if row is not None]

    def mean(self, setting: Setting, length: int) -> tuple[float, float, float] | None:
        """Mean over the tasks with its 95 % interval, shares; None unless all tasks are there.

        The tasks have the same number of samples, so the mean is the share of all samples; one
        interval for all of them is if anything too wide.
        """
        rows = self.of(setting, length)
        if len(rows) < len(self.tasks):
            return None
        asked = {row["asked"] for row in rows}
        if len(asked) > 1:
            raise ValueError(f"{setting.name}, {length} tokens: tasks have {sorted(asked)} samples")
        right, total = sum(r["right"] for r in rows), sum(r["asked"] for r in rows)
        return (right / total, *wilson_interval(right, total))

    def loss(self, setting: Setting, length: int) -> Loss | None:
        """Against full, on the samples of all tasks; None where one of the two is missing."""
        base, other = self.of(Setting(FULL), length), self.of(setting, length)
        if len(base) < len(self.tasks) or len(other) < len(self.tasks):
            return None
        if [r["asked"] for r in base] != [r["asked"] for r in other]:
            return None
        return paired_loss(
            *([x == "1" for r in rows for x in r["outcomes"]] for rows in (base, other))
        )


def share(value: float, low: float, high: float) -> str:
    return f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def by_budget(scores: Scores, length: int, cell: Callable[[Setting, int], str]) -> str:
    """A line for each policy, a column for each budget; what is missing is a dash."""
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


def runs_of(rows: Sequence[Row]) -> str:
    """Every commit and command of the rows, with the time at which its servers started."""
    runs: dict[tuple[str, str], str] = {}
    for row in rows:
        commit = row["commit"][:12] + (" with changes" if row["dirty"] else "")
        runs.setdefault((commit, row["command"]), row["time_utc"][:16])
    return "; ".join(f"commit {c}, {time} UTC, `{command}`" for (c, command), time in runs.items())


def document(rows: Sequence[Row], files: Sequence[str]) -> str:
    """The whole page; ``files`` are the names of those with the rows."""
    scores = Scores(rows)
    first = scores.rows[0]
    samples = sorted({row["asked"] for row in scores.rows})

    def mean_cell(setting: Setting, length: int) -> str:
        found = scores.mean(setting, length)
        return share(*found) if found else "–"

    def loss_cell(setting: Setting, length: int) -> str:
        found = None if setting.policy == FULL else scores.loss(setting, length)
        if found is None:
            return "" if setting.policy == FULL else "–"
        low, high = found.interval_points
        return f"{found.points:.1f} ({low:.1f} to {high:.1f})"

    names = " and ".join(f"[{name}]({name})" for name in files)
    parts = [
        "# Accuracy by policy and budget",
        f"Written by `benchmark/accuracy/table.py`; the rows are in {names}. Model "
        f"[{first['model']}](../../benchmark/accuracy/{first['model']}/README.md) (weights {first['weights']}, "
        f"{first['dtype']}), tasks of `benchmark/accuracy/tasks.py`: {', '.join(scores.tasks)}. "
        f"{' and '.join(map(str, samples))} texts for each task and length, one question each, the same for all "
        "policies; an answer counts if every token is right. The prompt ends before the question, and a grammar "
        "forces the question's tokens on the decode server: it is read with the policy that is measured. Intervals are "
        "95 %.",
        f"{first['cpu']}, {first['cores']} cores, {runs_of(scores.rows)}",
        "Policies are described in `benchmark/accuracy/policies.py`. Where a budget covers the whole text, every "
        "policy is full attention.",
        "![Share of right answers by budget](accuracy.png)",
        "## Right answers, mean of the tasks, percent",
    ]
    for length in scores.lengths:
        parts += [f"### {length} tokens", by_budget(scores, length, mean_cell)]
    parts += [
        "## Loss against full attention, points",
        "On the same samples; the interval is that of a paired comparison. Negative: better than full.",
    ]
    for length in scores.lengths:
        parts += [f"### {length} tokens", by_budget(scores, length, loss_cell)]
    length = max([n for n in scores.lengths if n <= DETAIL_TOKENS] or scores.lengths)
    parts += [f"## Each task at {length} tokens, percent", per_task(scores, length)]
    parts += ["## Pages computed on the CPU over the budget", cpu_ratios(scores)]
    return "\n\n".join(parts) + "\n"


def per_task(scores: Scores, length: int) -> str:
    lines = []
    for setting in scores.settings:
        rows = {row["task"]: row for row in scores.of(setting, length)}
        if not rows:
            continue
        label = plain(setting.policy)
        label += f", {setting.budget_tokens}" if setting.budget_tokens else ""
        cells = (rows.get(task) for task in scores.tasks)
        lines.append(
            [
                label,
                *(share(r["right"] / r["asked"], r["low"], r["high"]) if r else "–" for r in cells),
            ]
        )
    return markdown_table(["policy, budget", *scores.tasks], lines)


def cpu_ratios(scores: Scores) -> str:
    """Mean of the tasks, for each setting and length."""
    lines = []
    for setting in scores.settings:
        if setting.policy == FULL:
            continue
        cells = []
        for length in scores.lengths:
            found = [r["cpu_compute_ratio"] for r in scores.of(setting, length)]
            known = [x for x in found if x is not None]
            cells.append(f"{sum(known) / len(known):.3f}" if known else "–")
        lines.append([f"{plain(setting.policy)}, {setting.budget_tokens}", *cells])
    return markdown_table(["policy, budget", *(f"{n} tokens" for n in scores.lengths)], lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    text = document(
        [row for path in args.files for row in read_rows(path)], [path.name for path in args.files]
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
