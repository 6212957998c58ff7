"""Writes the tables of docs/results from the rows there, between `<!-- table NAME -->` and `<!-- end -->`.

    python -m benchmark.tables              # rewrites the pages
    python -m benchmark.tables --check      # exit status 1 if a table or a sentence differs

FIGURES has sentences with figures, which the check looks for in their documents.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache

from benchmark.rows import ROOT, argument_parser
from benchmark.tables import RESULTS, accuracy, figures, speed, systems

TABLES: dict[str, Callable[[], str]] = {
    name: table for page in (accuracy, systems, speed) for name, table in page.TABLES.items()
}
made = cache(lambda name: TABLES[name]())
BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """A page with its tables as the rows have them. Raises KeyError for a table that there is not."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{made(found[2])}\n\n{found[3]}", text)


def problems() -> list[str]:
    """Tables and sentences that differ from the rows."""
    found = []
    for page in sorted(RESULTS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for (_, name, _), block in zip(BLOCK.findall(text), BLOCK.finditer(text), strict=True):
            if filled(block[0]) != block[0]:
                found.append(f"{page.relative_to(ROOT)}: table {name} differs from the rows")
    for document, sentence in figures.sentences():
        words = " ".join((ROOT / document).read_text(encoding="utf-8").split())
        if sentence not in words:
            found.append(f"{document} does not say: {sentence}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    if not parser.parse_args(argv).check:
        for page in RESULTS.glob("*.md"):
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    print(*(found := problems()), sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
