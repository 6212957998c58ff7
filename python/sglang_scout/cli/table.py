"""Plain text for terminals: aligned columns and sizes."""

from __future__ import annotations

from collections.abc import Sequence

GIB = 2**30


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 0) -> str:
    """Rows as lines with aligned columns, two spaces between them.

    Args:
        rows: cells; a shorter row leaves its last columns empty.
        right: indices of right-aligned columns.
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
    """Bytes in powers of 1024: "10.00 GiB"."""
    return _scaled(nbytes, 1024, ("GiB", "MiB", "KiB"))


def gb(nbytes: float) -> str:
    """Bytes in powers of 1000: "10.74 GB"."""
    return _scaled(nbytes, 1000, ("GB", "MB", "KB"))


def _scaled(nbytes: float, base: int, units: tuple[str, str, str]) -> str:
    for power, unit in zip((3, 2, 1), units, strict=True):
        value = nbytes / base**power
        # A tenth of a unit is more readable than a hundred of the next smaller one.
        if value >= 0.1 or unit == units[-1]:
            break
    return f"{value:.2f} {unit}"
