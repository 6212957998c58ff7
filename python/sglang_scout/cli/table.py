"""Plain text for terminals: aligned columns and sizes."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 0) -> str:
    """Rows as lines with aligned columns, two spaces between them.

    Args:
        rows: cells; a shorter row leaves its last columns empty.
        right: numbers of the columns that are aligned to the right.
        indent: spaces before each line.
    """
    width = max((len(row) for row in rows), default=0)
    sizes = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(width)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(sizes[i]) if i in right else cell.ljust(sizes[i])
            for i, cell in enumerate(row)
        )
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def gib(nbytes: float) -> str:
    """Bytes as GiB (2**30), with enough digits for small things."""
    value = nbytes / 2**30
    return f"{value:.2f} GiB" if value >= 0.1 or value == 0 else f"{nbytes / 2**20:.2f} MiB"


def gb(nbytes: float) -> str:
    """Bytes as GB (10**9)."""
    value = nbytes / 1e9
    return f"{value:.2f} GB" if value >= 0.1 or value == 0 else f"{nbytes / 1e6:.2f} MB"


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as a Linux list: 0-3,8."""
    parts: list[str] = []
    start = previous = None
    for number in [*sorted(numbers), None]:
        if previous is not None and number == previous + 1:
            previous = number
            continue
        if previous is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number
    return ",".join(parts)
