#!/usr/bin/env python3
"""Makes .cache/texts: real texts of about 600,000 characters each, for long prompts.

    .venv/bin/python scripts/texts.py      prints their paths; a second if they exist already

prose      Genesis, Exodus and Samuel in the King James version, one paragraph per chapter.
           Public domain; from the Debian packages bible-kjv-text and bible-kjv (its reader).
technical  The Debian Administrator's Handbook, by Raphaël Hertzog and Roland Mas.
           GPL-2.0+ or CC-BY-SA-3.0; from the Debian package debian-handbook.
code       The graph algorithms of NetworkX: Python, with docstrings.
           BSD-3-Clause; from the PyPI package networkx.
"""

from __future__ import annotations

import re
import subprocess
import sys
import unicodedata
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from packages import CACHE, Unavailable, differs, from_debian, from_pypi, kept, print_paths

FOLDER = CACHE / "texts"
CHARACTERS = 600_000
# The contents of each, with the hash of the text.
SOURCES = {
    "prose": ("bible-kjv-text 4.38", "081c785ff41e6780f95d3754ffda66b888f67a55afe7bfe4dca97709b0da8e60"),
    "technical": ("debian-handbook 11.20220922", "4b02c67d4adf3fd370f5af81e01cb8dcf03e8029e9d7c53415748bf1636599c0"),
    "code": ("networkx 3.6.1", "069b67cc66b5639cf3003d3d52ec1ada9c4594d5e2342df91e45c066735e6a7a"),
}  # fmt: skip
PASSAGES = ("gen1:1-exo40:38", "1sa1:1-2sa24:25")
BLOCKS = {"div", "p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "dt", "dd", "tr", "td", "pre"}
PLAIN = {"‘’": "'", "“”«»": '"', "‐‑–": "-", "—": "--", "…": "...", "→": "->"}
NAVIGATION = {"banner", "title", "docnav", "docnav top", "toc"}


def chapters(verses: str) -> str:
    """One paragraph a chapter, of lines such as ``Ge1:2 And the earth was without form``."""
    paragraphs: dict[str, list[str]] = {}
    for line in verses.splitlines():
        place, verse = line.split(" ", 1)
        paragraphs.setdefault(place.split(":")[0], []).append(verse.strip())
    return "\n\n".join(" ".join(paragraph) for paragraph in paragraphs.values())


def text_of(node: ElementTree.Element, in_pre: bool = False) -> str:
    """The text of a page of the handbook, without navigation."""
    tag = node.tag.rpartition("}")[2]
    in_pre = in_pre or tag == "pre"

    def spaced(text: str | None) -> str:
        return (text or "") if in_pre else re.sub(r"\s+", " ", text or "")

    # A heading has the class "title", the line above all pages has the id.
    names = {node.get("id")} | (set() if tag == "p" or tag[0] == "h" else {node.get("class")})
    if tag in ("head", "script") or names & NAVIGATION:
        return ""
    text = spaced(node.text)
    for child in node:
        text += text_of(child, in_pre) + spaced(child.tail)
    return f"\n\n{text}\n\n" if tag in BLOCKS else text


def ascii_text(text: str) -> str:
    """Transliterates quotes, dashes and accented letters to ASCII; drops other characters."""
    for signs, plain in PLAIN.items():
        text = re.sub(f"[{signs}]", plain, text)
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _prose(folder: Path) -> str:
    for package in ("bible-kjv-text", "bible-kjv"):
        from_debian(package, folder)
    command = [folder / "usr/bin/bible", "-f", *PASSAGES]
    options = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    try:  # it finds its data where it runs
        run = subprocess.run(command, cwd=folder / "usr/lib", **options)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"bible-kjv does not run here ({error}); it needs libreadline8") from None
    return chapters(run.stdout)


def _technical(folder: Path) -> str:
    from_debian("debian-handbook", folder)
    pages = folder / "usr/share/doc/debian-handbook/html/en-US"
    index = (pages / "index.html").read_text()
    names = dict.fromkeys(re.findall(r'href="([\w.-]+\.html)[#"]', index))
    names.pop("index.html", None)
    texts = (text_of(ElementTree.parse(pages / name).getroot()) for name in names)
    return "\n\n".join(re.sub(r"\s*\n\s*\n\s*", "\n\n", text).strip() for text in texts)


def _code(folder: Path) -> str:
    from_pypi(SOURCES["code"][0].replace(" ", "=="), folder)
    algorithms = folder / "networkx" / "algorithms"
    paths = sorted(path for path in algorithms.rglob("[a-z]*.py") if "tests" not in path.parts)
    return "\n\n".join(f"# {path.relative_to(folder)}\n{path.read_text()}" for path in paths)


MAKERS = {"prose": _prose, "technical": _technical, "code": _code}


def make(kind: str) -> Path:
    """The path of a text, created if missing. Raises Unavailable."""
    source, expected = SOURCES[kind]
    whose = f"{source}, of another version perhaps than what was found"

    def write(path: Path) -> None:
        text = ascii_text(MAKERS[kind](path.parent))
        path.write_text(text[: text.rindex("\n", 0, CHARACTERS) + 1])  # up to the end of a line

    return kept(FOLDER / f"{kind}.txt", partial(differs, expected, whose), write)


def load_text(kind: str) -> str:
    """One of SOURCES. Raises Unavailable."""
    return make(kind).read_text()


if __name__ == "__main__":
    sys.exit(print_paths("texts", *(partial(make, kind) for kind in SOURCES)))
