"""Plain text for terminals: aligned columns and sizes."""

from __future__ import annotations

from collections.abc import Sequence

GIB = 2**30


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 0) -> str:
    """Rows of equal length as lines with aligned columns, two spaces apart; ``right``: the right-aligned ones."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [">" if i in right else "<" for i in range(len(sizes))]
    line = " " * indent + "  ".join(f"{{:{a}{n}}}" for a, n in zip(aligned, sizes, strict=True))
    return "\n".join(line.format(*row).rstrip() for row in rows)


def gib(nbytes: float) -> str:
    """Bytes in powers of 1024: "10.00 GiB"."""
    return _scaled(nbytes / 1024**3, 1024, ["GiB", "MiB", "KiB"])


def gb(nbytes: float) -> str:
    """Bytes in powers of 1000: "10.74 GB"."""
    return _scaled(nbytes / 1000**3, 1000, ["GB", "MB", "KB"])


def _scaled(value: float, base: int, units: list[str]) -> str:
    # A tenth of a unit is more readable than a hundred of the next smaller one.
    if value < 0.1 and len(units) > 1:
        return _scaled(value * base, base, units[1:])
    return f"{value:.2f} {units[0]}"
