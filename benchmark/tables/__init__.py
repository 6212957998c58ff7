"""The tables of docs/results and the figures of sentences, from the rows in docs/results; see __main__."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from statistics import median

from benchmark.rows import ROOT, Row, read_rows

RESULTS = ROOT / "docs" / "results"


@cache
def rows(name: str) -> list[Row]:
    """The measured rows of a file of docs/results."""
    return [row for row in read_rows(RESULTS / name) if row["status"] == "ok"]


def find(name: str, **fields: object) -> list[Row]:
    """The rows of a file with these fields. Raises ValueError if there are none."""
    found = [row for row in rows(name) if row | fields == row]
    if not found:
        raise ValueError(f"{name} has no row with {fields}")
    return found


def one(name: str, **fields: object) -> Row:
    """The only such row."""
    (row,) = find(name, **fields)
    return row


def number(value: float, digits: int = 0) -> str:
    return f"{value:,.{digits}f}".replace("-", "−")


def extremes(values: Iterable[float], digits: int = 0) -> str:
    """As "LOWEST to HIGHEST"; one number if both read the same."""
    found = list(values)
    low, high = number(min(found), digits), number(max(found), digits)
    return low if low == high else f"{low} to {high}"


def middle(values: Sequence[float], digits: int = 2) -> str:
    """Median and range."""
    return f"{number(median(values), digits)} ({extremes(values, digits)})"
