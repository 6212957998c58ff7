"""Markdown tables of the study's rows: planted facts and plain text.

    python -m benchmark.accuracy.study.table docs/results/study.jsonl

Facts, prompt: numbers answered correctly out of those asked for, by kind and by cut; points lost against full
attention on the same numbers; and loss increase on a number's answer in nats. Text: KL to full attention, loss
increase in nats, top-1 agreement with full attention. mass: share of the attention mass that was attended to.
Intervals are 95 %, from a bootstrap over documents, paired with full attention."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmark.accuracy.study.settings import OF_SYSTEMS
from benchmark.rows import Row, argument_parser, markdown_table, read_rows

SAMPLES = 2000


def interval(
    documents: Sequence[Row], mean: Callable[[Sequence[Row]], float]
) -> tuple[float, float]:
    """95 % bootstrap interval of the mean over documents; the same draws for the same number of documents."""
    rng = random.Random(0)
    means = sorted(mean(rng.choices(documents, k=len(documents))) for _ in range(SAMPLES))
    return means[round(0.025 * SAMPLES)], means[round(0.975 * SAMPLES) - 1]


def points_lost(rows: Sequence[Row]) -> float:
    """Numbers that full attention answers correctly minus those of the setting, in points."""
    full, own = (sum(sum(map(sum, row[name])) for row in rows) for name in ("full_right", "right"))
    return 100 * (full - own) / sum(len(x) for row in rows for x in row["right"])


def number_nats(rows: Sequence[Row]) -> float:
    """Loss increase on a number's digits against full attention."""
    lost = sum(sum(row["nats"]) - sum(row["full_nats"]) for row in rows)
    return lost / sum(len(x) for row in rows for x in row["right"])


def token_mean(name: str, less: str = "") -> Callable[[Sequence[Row]], float]:
    """Mean of a field over tokens; minus that of field ``less``, if given."""

    def mean(rows: Sequence[Row]) -> float:
        total = sum(
            n * (row[name][i] - (row[less][i] if less else 0.0))
            for row in rows
            for i, n in enumerate(row["tokens"])
        )
        return total / sum(sum(row["tokens"]) for row in rows)

    return mean


def share(rows: Sequence[Row], field: str, value: object) -> str:
    """Correct answers among those of this kind or cut, as "n/m"."""
    outcomes = [
        outcome
        for row in rows
        for key, right in zip(row[field], row["right"], strict=True)
        if key == value
        for outcome in right
    ]
    return f"{sum(outcomes)}/{len(outcomes)}"


def _mean_mass(rows: Sequence[Row], field: str = "mass") -> float:
    found = [x for row in rows for x in row[field]]
    return sum(found) / len(found)


def _with_interval(rows: Sequence[Row], mean: Callable[[Sequence[Row]], float], digits: int) -> str:
    low, high = interval(rows, mean)
    return f"{mean(rows):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def facts_table(by_setting: dict[str, list[Row]]) -> str:
    rows = next(iter(by_setting.values()))
    kinds = list(dict.fromkeys(k for row in rows for k in row["kind"]))
    cuts = sorted({c for row in rows for c in row["cut"]})
    head = ["setting", *kinds, *(f"at {c:,}" for c in cuts), "points lost", "nats a number", "mass"]
    full = [{**row, "right": row["full_right"]} for row in rows]
    cells = [share(full, "kind", k) for k in kinds] + [share(full, "cut", c) for c in cuts]
    lines = [["full attention", *cells, "", "", "1"]]
    for name, own in by_setting.items():
        cells = [share(own, "kind", k) for k in kinds] + [share(own, "cut", c) for c in cuts]
        lost, nats = _with_interval(own, points_lost, 1), _with_interval(own, number_nats, 2)
        lines.append([name, *cells, lost, nats, f"{_mean_mass(own):.3f}"])
    return markdown_table(head, lines)


def text_table(by_setting: dict[str, list[Row]]) -> str:
    lines = []
    for name, rows in by_setting.items():
        kl = _with_interval(rows, token_mean("kl"), 3)
        nats = _with_interval(rows, token_mean("nats", "full_nats"), 3)
        agree = f"{token_mean('agree')(rows):.1%}"
        tokens = f"{sum(sum(row['tokens']) for row in rows):,}"
        lines.append([name, tokens, kl, nats, agree, f"{_mean_mass(rows):.3f}"])
    return markdown_table(["setting", "tokens", "KL", "nats", "agreement", "mass"], lines)


def paired(rows: Sequence[Row], part: str) -> dict[str, list[Row]]:
    """Rows by setting, in order of budget, for the documents that all settings have."""
    mine = [row for row in rows if row["part"] == part]
    found: dict[str, list[Row]] = {}
    for row in sorted(mine, key=lambda row: row["document"]):
        found.setdefault(row["setting"], []).append(row)
    documents = [{row["document"] for row in own} for own in found.values()]
    common = set.intersection(*documents) if documents else set()
    ordered = sorted(found, key=lambda name: found[name][0]["budget_tokens"] or 0)
    return {name: [row for row in found[name] if row["document"] in common] for name in ordered}


def systems_table(rows: Sequence[Row]) -> str:
    """Of the set "systems": numbers right with the question decoded and in the prompt, losses on text, mass."""
    parts = {part: paired(rows, part) for part in ("facts", "prompt", "text")}
    lines = []
    for setting, name in OF_SYSTEMS.items():
        facts, prompt, text = (found.get(setting.name, []) for found in parts.values())
        cells = [name, f"{setting.budget_tokens:,}"]
        cells += [_right(facts), _right(prompt)] + ["–"] * 5
        if text:
            means = token_mean("nats", "full_nats"), token_mean("kl"), token_mean("agree")
            cells[4:] = [*(f"{mean(text):.3f}" for mean in means), f"{_mean_mass(text):.3f}", "–"]
            if "resident_mass" in text[0]:
                cells[-1] = f"{_mean_mass(text, 'resident_mass'):.3f}"
        lines.append(cells)
    head = ["system", "budget", "question decoded", "in the prompt", "nats", "KL", "agreement"]
    return markdown_table([*head, "mass", "resident mass"], lines)


def _right(rows: Sequence[Row]) -> str:
    found = [x for row in rows for outcomes in row["right"] for x in outcomes]
    return f"{sum(found)}/{len(found)}" if found else "–"


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("rows", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        rows = [row for row in read_rows(args.rows) if row["benchmark"] == "study"]
    except (OSError, ValueError, json.JSONDecodeError) as error:
        print(f"{args.rows}: {error}", file=sys.stderr)
        return 2
    for part, table in (("facts", facts_table), ("prompt", facts_table), ("text", text_table)):
        by_setting = paired(rows, part)
        if by_setting:
            documents = len(next(iter(by_setting.values())))
            print(f"\n{part}, {documents} documents\n")
            print(table(by_setting))
    return 0


if __name__ == "__main__":
    sys.exit(main())
