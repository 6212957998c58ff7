"""Real prose of any length from files that every machine has; no network."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Modules of the standard library that are mostly documentation.
MODULES = ("argparse", "decimal", "difflib", "doctest", "optparse", "pickletools", "typing")


def long_text(characters: int) -> str:
    """That many characters of this project's documents, then of the standard library.

    Raises ValueError when the machine has fewer.
    """
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            paths.append(Path(spec.origin))
    text = ""
    for path in paths:
        if len(text) >= characters:
            break
        if path.is_file():
            text += path.read_text(errors="replace") + "\n\n"
    if len(text) < characters:
        raise ValueError(f"found only {len(text)} characters of text, {characters} are needed")
    return text[:characters]


def text_of_tokens(model: Path, tokens: int) -> str:
    """Text of at least ``tokens`` and at most some percent more tokens of the model in ``model``.

    A model without tokenizer.json is taken to make one token of four characters.
    """
    if not (model / "tokenizer.json").is_file():
        return long_text(4 * tokens)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    characters = 2 * tokens
    while True:
        text = long_text(characters)
        count = len(tokenizer.encode(text, add_special_tokens=False).ids)
        if tokens <= count <= 1.1 * tokens:
            return text
        characters = max(1, int(characters * 1.04 * tokens / count))
