"""LongBench from the user's own copy: questions, lengths of answers and metrics. None of it is in this repository.

A copy is a clone of github.com/THUDM/LongBench, or the folder LongBench in it:

    config/dataset2prompt.json    set -> prompt with {context} and {input}
    config/dataset2maxlen.json    set -> most new tokens
    metrics.py, eval.py           eval.py's dataset2metric: set -> function of metrics.py
    data/SET.jsonl                from data.zip of the data set on Hugging Face

The two Python files run when answers are scored. They need packages that are not dependencies of ours.
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_scout.core.errors import ConfigError, ScoutError

# The eight that the paper uses (its figure 7).
PAPER_SETS = (
    *("narrativeqa", "qasper", "2wikimqa", "dureader"),
    *("gov_report", "qmsum", "samsum", "passage_retrieval_en"),
)
# LongBench's rules by set. Few-shot and completion prompts are continued as they stand: a chat
# template would end the pattern that the model has to go on with.
WITHOUT_CHAT = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
# After the answer the model writes the next example; only the first line counts.
FIRST_LINE = frozenset({"trec", "triviaqa", "samsum", "lsht"})
STOP_AT_NEWLINE = frozenset({"samsum"})

CLONE = "git clone https://github.com/THUDM/LongBench"
DATA_ZIP = "https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip"
# (prediction, answer, all_classes=...) -> 0..1
Metric = Callable[..., float]


def sha(value: Any) -> str:
    """Of anything that JSON can hold, 16 hex digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Question:
    """One row of a set, its prompt filled in."""

    set_name: str
    id: str
    prompt: str
    answers: tuple[str, ...]
    all_classes: list[str] | None
    max_new_tokens: int

    @cached_property
    def key(self) -> tuple[str, str, str]:
        """Set, id and a digest of all else: an answer belongs to these data, not to later ones."""
        rest = [self.prompt, self.answers, self.all_classes, self.max_new_tokens]
        return self.set_name, self.id, sha(rest)


class LongBench:
    """A local copy. Raises ConfigError where something is not there or is not what it should be."""

    def __init__(self, folder: Path) -> None:
        places = (folder, folder / "LongBench")
        found = [place for place in places if (place / "config/dataset2prompt.json").is_file()]
        if not found:
            raise ConfigError(
                f"--longbench {folder}: no config/dataset2prompt.json in it or in its folder "
                f"LongBench; get a copy with: {CLONE}"
            )
        self.folder = found[0]
        try:
            self._prompts, self._max_new_tokens = (
                dict(json.loads((self.folder / "config" / name).read_text(encoding="utf-8")))
                for name in ("dataset2prompt.json", "dataset2maxlen.json")
            )
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.folder}: {error}; get a fresh copy with: {CLONE}") from None

    def questions(self, name: str) -> list[Question]:
        """All of a set, in the order of the file."""
        known = [one for one in self._prompts if one in self._max_new_tokens]
        if name not in known:
            raise ConfigError(f"--sets {name}: not in this copy; it has {', '.join(known)}")
        path, where, questions = self.folder / "data" / f"{name}.jsonl", "", []
        try:
            # Not str.splitlines: the texts may hold other characters that it takes for line ends.
            with path.open(encoding="utf-8", newline="\n") as file:
                for number, line in enumerate(file, 1):
                    where = f":{number}"
                    if line.strip():
                        questions.append(self._question(name, json.loads(line)))
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}{where}: {error!r}; unpack {DATA_ZIP} into {self.folder}, or leave the set "
                "out of --sets"
            ) from None
        if not questions:
            raise ConfigError(f"{path}: no rows; unpack it again from {DATA_ZIP}")
        return questions

    def _question(self, name: str, row: dict[str, Any]) -> Question:
        prompt = self._prompts[name].format(**row)
        classes, length = row.get("all_classes") or None, self._max_new_tokens[name]
        return Question(name, row["_id"], prompt, tuple(row["answers"]), classes, length)

    def metrics(self) -> dict[str, Metric]:
        """eval.py's table, set to metric. Runs eval.py and metrics.py; ScoutError if they cannot be run."""
        sys.path.insert(0, str(self.folder))  # eval.py says `from metrics import ...`
        try:
            table: dict[str, Metric] = runpy.run_path(f"{self.folder}/eval.py")["dataset2metric"]
            return table
        except Exception as error:
            raise ScoutError(
                f"{self.folder}/eval.py: {error!r}; install what it lacks into .venv "
                f"(docs/accuracy.md), or get a complete copy: {CLONE}"
            ) from error
        finally:
            sys.path.remove(str(self.folder))
            sys.modules.pop("metrics", None)


def points(metric: Metric, question: Question, text: str) -> float:
    """The best over the true answers, 0..100."""
    if question.set_name in FIRST_LINE:
        text = text.lstrip("\n").partition("\n")[0]
    found = [metric(text, one, all_classes=question.all_classes) for one in question.answers]
    return 100 * float(max(found, default=0.0))
