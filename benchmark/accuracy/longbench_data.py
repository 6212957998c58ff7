"""What the LongBench harness reads from the user's own copy: prompts, data and metrics.

Nothing of LongBench is in this repository. A copy is a clone of github.com/THUDM/LongBench or its folder
``LongBench``:

    config/dataset2prompt.json    set -> prompt with {context} and {input}
    config/dataset2maxlen.json    set -> most new tokens
    metrics.py, eval.py           eval.py's dataset2metric: set -> function of metrics.py
    data/SET.jsonl                from data.zip of the data set on Hugging Face; --data names another folder

The two Python files are run, and only when answers are scored: they need packages that are not dependencies of ours.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_scout.core.errors import ConfigError, ScoutError

# The eight that the paper uses (its figure 7).
PAPER_SETS = (
    "narrativeqa",
    "qasper",
    "2wikimqa",
    "dureader",
    "gov_report",
    "qmsum",
    "samsum",
    "passage_retrieval_en",
)
# LongBench's rules by set. Few-shot and completion prompts are continued as they stand: a chat
# template would end the pattern that the model has to go on with.
WITHOUT_CHAT = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
# After the answer the model writes the next example; only the first line counts.
FIRST_LINE = frozenset({"trec", "triviaqa", "samsum", "lsht"})
STOP_AT_NEWLINE = frozenset({"samsum"})

CLONE = "git clone https://github.com/THUDM/LongBench"
DATA_ZIP = "https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip"
FIELDS: dict[str, type] = {"input": str, "context": str, "answers": list, "_id": str}
# (prediction, answer, all_classes=...) -> 0..1
Metric = Callable[..., float]


@dataclass(frozen=True)
class Question:
    """One row of a set. ``key`` is its _id, with ``#2`` and so on should a file repeat one."""

    set_name: str
    key: str
    prompt: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...] | None


class LongBench:
    """A local copy. Looks for what it needs at once; reads a set when asked for it.

    Args:
        folder: the clone, or its folder ``LongBench``.
        data: folder with ``SET.jsonl`` files or with a folder ``data`` that holds them. Default: the
            same two places in the copy and beside its scripts.

    Raises:
        ConfigError: the configuration is not there or is no JSON object.
    """

    def __init__(self, folder: Path, data: Path | None = None) -> None:
        places = [folder, folder / "LongBench"]
        found = [place for place in places if (place / "config/dataset2prompt.json").is_file()]
        if not found:
            raise ConfigError(
                f"--longbench {folder}: no config/dataset2prompt.json in it or in its folder "
                f"LongBench; get a copy with: {CLONE}"
            )
        self.folder = found[0]
        self.given = folder
        self._data_given = data
        bases = [data] if data is not None else [self.folder, folder]
        self._data_places = [place for base in bases for place in (base / "data", base)]
        self._prompts = self._config("dataset2prompt.json", str)
        self._max_new_tokens = self._config("dataset2maxlen.json", int)

    def _config(self, name: str, kind: type) -> dict[str, Any]:
        path = self.folder / "config" / name
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--longbench {self.given}: {path}: {error}; get a fresh copy with: {CLONE}"
            ) from None
        if not isinstance(table, dict) or not all(isinstance(x, kind) for x in table.values()):
            raise ConfigError(
                f"--longbench {self.given}: {path} is not an object of {kind.__name__} values; "
                f"get a fresh copy with: {CLONE}"
            )
        return table

    @property
    def set_names(self) -> list[str]:
        """Sets that have a prompt and a length."""
        return [name for name in self._prompts if name in self._max_new_tokens]

    @property
    def longest_answer_tokens(self) -> int:
        """The most new tokens of any set."""
        return max(self._max_new_tokens.values())

    def max_new_tokens(self, set_name: str) -> int:
        return self._max_new_tokens[set_name]

    def check_sets(self, names: Sequence[str]) -> None:
        """Raises ConfigError for a set that the copy does not know."""
        known = self.set_names
        for name in names:
            if name not in known:
                raise ConfigError(f"--sets {name}: not in this copy; it has {', '.join(known)}")

    def data_file(self, set_name: str) -> Path:
        """Raises ConfigError where no place holds the file."""
        for place in self._data_places:
            if (place / f"{set_name}.jsonl").is_file():
                return place / f"{set_name}.jsonl"
        flag = (
            f"--longbench {self.given}"
            if self._data_given is None
            else f"--data {self._data_given}"
        )
        raise ConfigError(
            f"{flag}: no {set_name}.jsonl in {', '.join(map(str, self._data_places))}; unpack "
            f"{DATA_ZIP} there, name its folder with --data, or leave the set out of --sets"
        )

    def digest(self, set_name: str) -> str:
        """Of all that decides the questions of a set: prompt, length and data. 16 hex digits."""
        summed = hashlib.sha256()
        about = [self._prompts[set_name], self._max_new_tokens[set_name]]
        summed.update(json.dumps(about).encode())
        with self.data_file(set_name).open("rb") as file:
            while block := file.read(1 << 20):
                summed.update(block)
        return summed.hexdigest()[:16]

    def questions(self, set_name: str, limit: int | None = None) -> list[Question]:
        """The first ``limit`` rows of a set (all of them for None), in the order of the file.

        Raises:
            ConfigError: a line is no row; names file, line and field.
        """
        path = self.data_file(set_name)
        questions: list[Question] = []
        seen: dict[str, int] = {}
        # Not str.splitlines: the texts may hold other characters that it takes for line ends.
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(questions) == limit:
                    break
                if not line.strip():
                    continue
                row = _parse_row(line, f"{path}:{number}")
                key = row["_id"]
                seen[key] = seen.get(key, 0) + 1
                if seen[key] > 1:
                    key = f"{key}#{seen[key]}"
                questions.append(
                    Question(
                        set_name,
                        key,
                        self._fill(set_name, row),
                        tuple(row["answers"]),
                        tuple(row["all_classes"]) if row.get("all_classes") else None,
                    )
                )
        if not questions:
            raise ConfigError(f"{path}: no rows; unpack it again from {DATA_ZIP}")
        return questions

    def _fill(self, set_name: str, row: dict[str, Any]) -> str:
        try:
            return self._prompts[set_name].format(**row)
        except (KeyError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{self.folder}/config/dataset2prompt.json: the prompt of {set_name} cannot be "
                f"filled in ({error!r}); it may hold {{context}} and {{input}}"
            ) from None

    def absent_packages(self) -> list[str]:
        """What the metrics import and this environment lacks. Reads, and runs nothing."""
        names: dict[str, None] = {}
        for script in ("metrics.py", "eval.py"):
            path = self._script(script)
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except SyntaxError as error:
                raise ConfigError(f"{path}: not Python ({error}); get a fresh copy") from None
            for node in tree.body:
                if isinstance(node, ast.Import):
                    names.update((alias.name.split(".")[0], None) for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names[node.module.split(".")[0]] = None
        names.pop("metrics", None)  # eval.py's neighbour
        return [name for name in names if not _is_installed(name)]

    def metrics(self) -> dict[str, Metric]:
        """eval.py's table: set to metric, 0..1. Runs metrics.py and eval.py.

        Raises:
            ScoutError: a package is missing (says what to install), or the table is.
        """
        absent = self.absent_packages()
        if absent:
            raise ScoutError(
                f"LongBench's metrics in {self.folder} need {', '.join(absent)}; install with: "
                f"pip install {' '.join(absent)}"
            )
        # eval.py says `from metrics import ...`, and no other module of that name may answer.
        previous = sys.modules.get("metrics")
        sys.modules["metrics"] = self._load("metrics.py")
        try:
            table = getattr(self._load("eval.py"), "dataset2metric", None)
        finally:
            if previous is None:
                del sys.modules["metrics"]
            else:
                sys.modules["metrics"] = previous
        if not isinstance(table, dict):
            raise ScoutError(f"{self.folder / 'eval.py'} has no dataset2metric; get it: {CLONE}")
        return table

    def _script(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise ConfigError(
                f"--longbench {self.given}: no {path}; get a complete copy with: {CLONE}"
            )
        return path

    def _load(self, name: str) -> ModuleType:
        path = self._script(name)
        spec = importlib.util.spec_from_file_location(f"longbench_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ScoutError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
        return module


def counted_part(set_name: str, text: str) -> str:
    """The part of an answer that LongBench scores: of few-shot sets the first line with text."""
    if set_name in FIRST_LINE:
        return text.lstrip("\n").partition("\n")[0]
    return text


def score(metric: Metric, question: Question, text: str) -> float:
    """The best over the true answers, 0..1.

    Raises:
        ScoutError: the metric raises; names set and row.
    """
    prediction = counted_part(question.set_name, text)
    classes = list(question.all_classes) if question.all_classes is not None else None
    best = 0.0
    for answer in question.answers:
        try:
            best = max(best, float(metric(prediction, answer, all_classes=classes)))
        except Exception as error:
            raise ScoutError(
                f"{question.set_name}, row {question.key}: LongBench's "
                f"{getattr(metric, '__name__', 'metric')} raises {type(error).__name__}: {error}"
            ) from error
    return best


def _parse_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); unpack it from {DATA_ZIP}") from None
    for name, kind in FIELDS.items():
        value = row.get(name) if isinstance(row, dict) else None
        if not isinstance(value, kind):
            raise ConfigError(
                f"{where}: {name} is {value!r}, expected {kind.__name__}; unpack it from {DATA_ZIP}"
            )
    return row


def _is_installed(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
