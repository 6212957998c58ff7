"""Tables of the study's rows (benchmark/accuracy/study), one setting a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from benchmark.accuracy.study.table import interval, points_lost, token_mean
from benchmark.rows import Row, markdown_table
from benchmark.tables import number, rows

Rows = list[Row]
DEFAULT = "reduce=value query=predicted attends=reweighed-missing"
"""What ``--kv-offload scout`` does."""
SERVER = "query=predicted attends=reweighed-missing"
"""The same without the values' norms, as in older rows."""
PAPER = "query=predicted attends=predicted-missing"


def right(found: Rows, field: str = "right") -> str:
    return str(sum(sum(map(sum, row[field])) for row in found))


def nats(found: Rows) -> str:
    """Loss of all answers against full attention."""
    lost = sum(sum(row["nats"]) - sum(row["full_nats"]) for row in found)
    return number(lost, 0 if abs(lost) >= 10 else 1)


def lost(found: Rows) -> str:
    """Points, with the 95 % interval over documents."""
    low, high = interval(found, points_lost)
    return f"{number(points_lost(found), 1)} ({number(low, 1)} to {number(high, 1)})"


def mean(name: str, less: str = "", digits: int = 3) -> Callable[[Rows], str]:
    return lambda found: number(token_mean(name, less)(found), digits)


def mass(found: Rows) -> str:
    values = [x for row in found for x in row["mass"]]
    return number(sum(values) / len(values), 2)


def cpu(found: Rows) -> str:
    """CPU compute ratio, mean over layers."""
    values = [x for row in found for x in row["cpu_by_layer"]]
    return number(sum(values) / len(values), 2)


@dataclass(frozen=True)
class Column:
    """``part`` of the study: facts (the question is decoded), prompt, text."""

    head: str
    part: str
    cell: Callable[[Rows], str]


COLUMNS = {
    "right": Column("right, decoded", "facts", right),
    "lost": Column("points lost", "facts", lost),
    "nats": Column("nats", "facts", nats),
    "prompt": Column("right, in prompt", "prompt", right),
    "prompt lost": Column("points lost", "prompt", lost),
    "prompt nats": Column("nats", "prompt", nats),
    "kl": Column("KL of text", "text", mean("kl")),
    "text": Column("nats a token", "text", mean("nats", "full_nats")),
    "agree": Column("same likeliest token", "text", mean("agree", digits=2)),
    "cpu": Column("CPU compute ratio", "facts", cpu),
    "mass": Column("attention mass", "text", mass),
}


def of(file: str, setting: str, part: str) -> Rows:
    found = [row for row in rows(file) if (row["setting"], row["part"]) == (setting, part)]
    return sorted(found, key=lambda row: row["document"])


def study(
    file: str,
    lines: Mapping[str, str],
    columns: Iterable[str | Column],
    *,
    full: bool = False,
    first: str = "setting",
) -> str:
    """A line for each setting, given as the rows name it, after another file's name and a colon if it is of that.

    Args:
        full: begin with full attention.
    Raises:
        ValueError: a line has no row; or two of a column are of different documents.
    """
    chosen = [COLUMNS[x] if isinstance(x, str) else x for x in columns]
    made: list[list[str]] = [[label] for label in lines]
    top = ["full attention"]
    for column in chosen:
        each = []
        for setting in lines.values():
            other, _, name = setting.rpartition(": ")
            each.append(of(other or file, name, column.part))
        if len({str([row["document"] for row in found]) for found in each if found}) != 1:
            raise ValueError(f"{file}: {column.head} is of different documents, or of none")
        for line, found in zip(made, each, strict=True):
            line.append(column.cell(found) if found else "")
        is_count = column.cell is right
        top.append(right(next(filter(None, each)), "full_right") if is_count else "")
    for line, setting in zip(made, lines.values(), strict=True):
        if not any(line[1:]):
            raise ValueError(f"{file} has no row of {setting}")
    heads = [first, *(column.head for column in chosen)]
    return markdown_table(heads, [top, *made] if full else made)
