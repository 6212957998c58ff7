"""Scores of LongBench answers, and the difference between two servers with its uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from longbench_answers import Answers
from longbench_data import PAPER_SETS, LongBench, score

from sglang_scout.core.errors import ConfigError

SEED = 20260101
RESAMPLES = 10_000
INTERVAL_PERCENT = (2.5, 97.5)
MEAN = "mean"
# Below, resampling what was drawn says too little about what was not.
FEW_QUESTIONS = 30


@dataclass(frozen=True)
class SetScores:
    """Points (0..100) of the same questions for every file.

    Attributes:
        points: [files, questions] float64.
        left_out: questions of the set that some file lacks or failed.
    """

    name: str
    metric: str
    points: np.ndarray
    left_out: int


@dataclass(frozen=True)
class Difference:
    """Of one file against the first, in points. ``low`` and ``high`` are None for a single question."""

    set_name: str
    score: float
    baseline: float
    difference: float
    low: float | None
    high: float | None


def find_copy(files: Sequence[Answers], folder: Path | None, data: Path | None) -> LongBench:
    """The copy that was named, or the one that the first file was made with.

    Raises:
        ConfigError: it is not there.
    """
    run = files[0].runs[-1]
    if data is None and run.get("data") and folder is None:
        data = Path(run["data"])
    return LongBench(folder or Path(run["longbench"]), data)


def score_sets(files: Sequence[Answers], copy: LongBench) -> list[SetScores]:
    """Score all questions that every file has answered.

    Raises:
        ConfigError: the files were asked different prompts, or the copy is not the one that they
            were asked from, or they have nothing in common.
        ScoutError: LongBench's metrics cannot be run.
    """
    keys = [{key for key, row in file.by_key.items() if row["status"] == "ok"} for file in files]
    common, asked = set.intersection(*keys), set().union(*(file.by_key for file in files))
    _same_prompts(files, common)
    names = sorted({name for name, _ in asked}, key=_order)
    _same_copy(files, copy, names)
    copy.check_sets(names)
    metrics = copy.metrics()
    found = []
    for name in names:
        if name not in metrics:
            raise ConfigError(f"{copy.folder / 'eval.py'}: dataset2metric has no {name}")
        questions = [q for q in copy.questions(name) if (name, q.key) in common]
        points = [
            [100 * score(metrics[name], q, file.by_key[name, q.key]["text"]) for q in questions]
            for file in files
        ]
        left_out = sum(key[0] == name for key in asked) - len(questions)
        metric = getattr(metrics[name], "__name__", "")
        table = np.array(points, dtype=np.float64).reshape(len(files), len(questions))
        found.append(SetScores(name, metric, table, left_out))
    if not any(one.points.shape[1] for one in found):
        named = ", ".join(str(file.path) for file in files)
        raise ConfigError(f"{named}: no question is answered in every file; run --sets that meet")
    return found


def _order(name: str) -> tuple[int, str]:
    return (PAPER_SETS.index(name) if name in PAPER_SETS else len(PAPER_SETS), name)


def _same_prompts(files: Sequence[Answers], common: set[tuple[str, str]]) -> None:
    first = files[0]
    for other in files[1:]:
        differ = [
            key
            for key in common
            if first.by_key[key]["prompt_sha"] != other.by_key[key]["prompt_sha"]
        ]
        if differ:
            mine, theirs = first.runs[-1]["settings"], other.runs[-1]["settings"]
            how = [f"{k} {mine[k]} and {theirs[k]}" for k in ("max_prompt_tokens", "chat")]
            raise ConfigError(
                f"{first.path} and {other.path}: {len(differ)} of {len(common)} questions were "
                f"asked with different prompts ({', '.join(how)}); run both with the same "
                "--max-prompt-tokens, --chat and --tokenizer"
            )


def _same_copy(files: Sequence[Answers], copy: LongBench, names: Sequence[str]) -> None:
    for name in names:
        digest = copy.digest(name)
        for file in files:
            for run in file.runs:
                if run["digests"].get(name, digest) != digest:
                    raise ConfigError(
                        f"--longbench {copy.given}: prompt, length or data of {name} are not those "
                        f"that {file.path} was asked; name the copy of that run"
                    )


def differences(sets: Sequence[SetScores], file: int) -> list[Difference]:
    """One for each set that has answers, then their mean (every set counts alike).

    The interval is a paired bootstrap: questions of a set are drawn with replacement, the same for
    both servers; sets are not drawn. Seed and number of draws are fixed.
    """
    rng = np.random.default_rng(SEED)
    found = []
    draws = []
    used = [one for one in sets if one.points.shape[1]]
    for one in used:
        change = one.points[file] - one.points[0]
        count = len(change)
        means = change[rng.integers(count, size=(RESAMPLES, count))].mean(axis=1)
        draws.append(means if count > 1 else None)
        low, high = _interval(draws[-1])
        here, there = float(one.points[file].mean()), float(one.points[0].mean())
        found.append(Difference(one.name, here, there, here - there, low, high))
    every = [means for means in draws if means is not None]
    low, high = _interval(np.mean(every, axis=0) if len(every) == len(used) else None)
    here = float(np.mean([one.score for one in found]))
    there = float(np.mean([one.baseline for one in found]))
    found.append(Difference(MEAN, here, there, here - there, low, high))
    return found


def _interval(means: np.ndarray | None) -> tuple[float | None, float | None]:
    if means is None:
        return None, None
    low, high = np.percentile(means, INTERVAL_PERCENT)
    return float(low), float(high)


def markdown(files: Sequence[Answers], sets: Sequence[SetScores]) -> str:
    """The comparison as a table, the first file being the baseline, with what must be known of it."""
    labels = [file.label for file in files]
    head = ["set", "metric", "questions", labels[0]]
    for label in labels[1:]:
        head += [label, "difference", "95 % interval"]
    compared = [differences(sets, number) for number in range(1, len(files))]
    used = [one for one in sets if one.points.shape[1]]
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    total = sum(one.points.shape[1] for one in used)
    for at in range(len(used) + 1):
        is_mean = at == len(used)
        baseline = compared[0][at].baseline
        cells = [MEAN, "", str(total)] if is_mean else _set_cells(used[at])
        cells.append(f"{baseline:.2f}")
        for changes in compared:
            cells += _change_cells(changes[at])
        lines.append([f"**{cell}**" if cell else "" for cell in cells] if is_mean else cells)
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{text}\n\n{notes(files, sets)}\n"


def _set_cells(one: SetScores) -> list[str]:
    return [one.name, one.metric, str(one.points.shape[1])]


def _change_cells(change: Difference) -> list[str]:
    interval = "–"
    if change.low is not None and change.high is not None:
        interval = f"{_signed(change.low)} to {_signed(change.high)}"
    return [f"{change.score:.2f}", _signed(change.difference), interval]


def _signed(points: float) -> str:
    rounded = round(points, 2)
    return f"{rounded:+.2f}" if rounded else "0.00"


def notes(files: Sequence[Answers], sets: Sequence[SetScores]) -> str:
    """What the numbers are of: metric, models, prompts, and questions that are not in them."""
    lines = ["- Points of LongBench's own metrics, 0 to 100; every set counts alike in the mean."]
    if len(files) > 1:
        lines.append(
            f"- Differences against {files[0].label}, question by question. Intervals: paired "
            f"bootstrap over the questions of each set, {RESAMPLES} draws, seed {SEED}."
        )
        if any(0 < one.points.shape[1] < FEW_QUESTIONS for one in sets):
            lines.append(
                f"- **Too few questions:** with fewer than {FEW_QUESTIONS} in a set its interval is "
                "too narrow, and so is that of the mean."
            )
    for file in files:
        run = file.runs[-1]
        cut = sum(row["cut_tokens"] > 0 for row in file.by_key.values())
        lines.append(
            f"- {file.label}: model {run['model']}, {run['time_utc'][:10]}, {len(file.by_key)} "
            f"questions, {cut} of them cut in the middle to {run['settings']['max_prompt_tokens']} tokens."
        )
    missing = [f"{one.left_out} of {one.name}" for one in sets if one.left_out]
    if missing:
        lines.append(
            f"- **Not in the table:** {', '.join(missing)}, which a file lacks or which failed. "
            "Run it again into the same file."
        )
    return "\n".join(lines)
