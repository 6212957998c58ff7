"""Prompts of real text for benchmarks with servers: the user's, or what every machine has; as token ids."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer

from sglang_scout.core.errors import ScoutError


def make_prompts(
    model_path: str, dataset: str | None, *, count: int, length_tokens: int, least_tokens: int
) -> list[list[int]]:
    """``count`` prompts of at most ``length_tokens`` tokens.

    Args:
        dataset: a text file, cut into as many parts; or a .jsonl file of objects with ``prompt`` or
            ``text`` (a string) or ``input_ids`` (a list of numbers), of which longer ones lose their
            beginning. None: the sources of Python's standard library, prose and code.
        least_tokens: shorter prompts would tell nothing and are left out.
    Raises:
        ScoutError: too little text.
    """
    if dataset is not None and dataset.endswith(".jsonl"):
        prompts = _from_lines(model_path, dataset, length_tokens, least_tokens)
    else:
        ids = _text_ids(model_path, dataset, count * length_tokens)
        length = min(length_tokens, len(ids) // count)
        prompts = [ids[i * length : (i + 1) * length] for i in range(count)]
    if len(prompts) < count or len(prompts[-1]) < least_tokens:
        raise ScoutError(
            f"{describe(dataset)}: not {count} prompts of at least {least_tokens} tokens; give more text"
        )
    return prompts[:count]


def describe(dataset: str | None) -> str:
    return "Python's standard library" if dataset is None else Path(dataset).name


def _from_lines(
    model_path: str, dataset: str, length_tokens: int, least_tokens: int
) -> list[list[int]]:
    entries = map(json.loads, filter(str.strip, Path(dataset).read_text("utf-8").splitlines()))
    prompts = []
    for entry in entries:
        text = entry.get("prompt", entry.get("text"))
        ids = entry["input_ids"] if text is None else _encode(_tokenizer(model_path), text)
        if len(ids) >= least_tokens:
            prompts.append(ids[-length_tokens:])
    return prompts


def _text_ids(model_path: str, dataset: str | None, tokens: int) -> list[int]:
    """Of a text file all tokens, of the standard library at least ``tokens``, if there are as many."""
    tokenizer = _tokenizer(model_path)
    if dataset is not None:
        return _encode(tokenizer, Path(dataset).read_text("utf-8"))
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(ids) >= tokens:
            break
        ids += _encode(tokenizer, path.read_text("utf-8", "replace"))
    return ids


def _tokenizer(model_path: str) -> Tokenizer:
    return Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids
