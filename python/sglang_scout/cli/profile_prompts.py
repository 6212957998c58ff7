"""Prompts for a profile: the user's, or text that every machine has; as token ids."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from sglang_scout.core.errors import ConfigError

DATASET = "profile: --dataset"


class Encoding(Protocol):
    ids: list[int]


class Tokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Encoding: ...


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
        ConfigError: nothing usable, or too little of it.
    """
    if dataset is not None and dataset.endswith(".jsonl"):
        return _from_lines(model_path, dataset, count, length_tokens, least_tokens)
    tokenizer = _tokenizer(model_path)
    if dataset is None:
        ids = _standard_library(tokenizer, count * length_tokens)
    else:
        ids = tokenizer.encode(_read(dataset), add_special_tokens=False).ids
    if len(ids) < count * least_tokens:
        raise ConfigError(
            f"{DATASET} {dataset or '(standard library)'}: {len(ids)} tokens, {count} prompts of "
            f"more than the budget need {count * least_tokens}; give more text, or a smaller "
            "--batch or --budget"
        )
    length = min(length_tokens, len(ids) // count)
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def describe(dataset: str | None) -> str:
    return "Python's standard library" if dataset is None else Path(dataset).name


def _from_lines(
    model_path: str, dataset: str, count: int, length_tokens: int, least_tokens: int
) -> list[list[int]]:
    tokenizer: Tokenizer | None = None
    found, short = [], 0
    for number, entry in _entries(dataset):
        where = f"{DATASET} {dataset}: line {number}"
        text, ids = entry.get("prompt", entry.get("text")), entry.get("input_ids")
        if isinstance(text, str):
            tokenizer = tokenizer or _tokenizer(model_path)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        elif not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
            raise ConfigError(
                f"{where} has no prompt; expected a string as prompt or text, or numbers as "
                "input_ids"
            )
        if len(ids) < least_tokens:
            short += 1
            continue
        found.append(ids[-length_tokens:])
        if len(found) == count:
            return found
    raise ConfigError(
        f"{DATASET} {dataset}: {len(found)} prompts of at least {least_tokens} tokens ({short} are "
        f"shorter), --batch {count} needs as many; give longer ones, or a smaller --batch or --budget"
    )


def _entries(dataset: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_read(dataset).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{DATASET} {dataset}: line {number} is no JSON: {error}; give one object in each line"
            ) from None
        if not isinstance(entry, dict):
            raise ConfigError(
                f"{DATASET} {dataset}: line {number} is no object; give one in each line, with prompt, "
                "text or input_ids"
            )
        yield number, entry


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{DATASET} {path}: cannot read it: {error}; name a text file "
            "in UTF-8 or a .jsonl file, or leave the flag out"
        ) from None


def _tokenizer(model_path: str) -> Tokenizer:
    from tokenizers import Tokenizer as Fast

    path = Path(model_path) / "tokenizer.json"
    try:
        tokenizer: Tokenizer = Fast.from_file(str(path))
    except Exception as error:  # tokenizers raises no class of its own
        raise ConfigError(
            f"profile: --model-path {model_path}: cannot read tokenizer.json: {error}; give a "
            "--dataset with input_ids"
        ) from None
    return tokenizer


def _standard_library(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """At least ``tokens`` tokens, if there are as many."""
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(ids) >= tokens:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        ids += tokenizer.encode(text, add_special_tokens=False).ids
    return ids
