"""Scores of LongBench answers and the differences between servers, with intervals, as one Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmark.accuracy.longbench_data import PAPER_SETS, LongBench, Question, points
from benchmark.rows import Row, markdown_table, read_rows
from sglang_scout.core.errors import ConfigError

# Fields of a row: settings of its run, and what tells the rows of a run apart. The label is impl.
SETTINGS = ("impl", "model", "chat", "max_prompt_tokens")
KEY = ("set", "id", "question_sha")
SEED, RESAMPLES = 20260101, 10_000


class Answers:
    """A file: ``last`` row, keys that were ``tried``, and by key the rows that are ``ok``.

    Raises ConfigError if it is none of ours, or not all rows have the same ``settings`` (default: the last row's).
    """

    def __init__(self, path: Path, settings: Row | None = None) -> None:
        try:
            rows = read_rows(path)
            self.last = rows[-1]
            keyed = [(tuple(row[name] for name in KEY), row) for row in rows]
            same = [(name, (settings or self.last)[name]) for name in SETTINGS]
            other = [
                f"{n} {row[n]!r} and not {x!r}" for row in rows for n, x in same if row[n] != x
            ]
        except (OSError, ValueError, LookupError) as error:
            raise ConfigError(f"{path}: {error!r}; name a file that longbench.py wrote") from None
        if other:
            raise ConfigError(f"{path}: holds answers with {other[0]}; one file for each")
        self.tried = {key for key, _ in keyed}
        self.ok = {key: row for key, row in keyed if row["status"] == "ok"}


def mean_interval(by_set: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Mean of the sets' means, with its 95 % interval; nan where a set has a single question.

    By bootstrap: questions of a set are drawn with replacement, sets are not drawn. The seed is fixed.
    """
    mean = float(np.mean([one.mean() for one in by_set]))
    if min(map(len, by_set)) < 2:
        return mean, np.nan, np.nan
    rng = np.random.default_rng(SEED)
    draws = [one[rng.integers(len(one), size=(RESAMPLES, len(one)))].mean(1) for one in by_set]
    low, high = np.percentile(np.mean(draws, axis=0), (2.5, 97.5))
    return mean, float(low), float(high)


def _cell(by_set: Sequence[np.ndarray], sign: str = "") -> str:
    mean, *ends = (f"{x:{sign}z.2f}" for x in mean_interval(by_set))
    return f"{mean} ({' to '.join(ends)})" if "nan" not in ends[0] else mean


def table(paths: Sequence[Path], folder: Path | None = None) -> str:
    """The first file is the baseline of the others; questions count that all of them have answered.

    ``folder``: a copy of LongBench; default: that of the first file's run. Raises ConfigError if the
    files were asked different prompts or have nothing in common, ScoutError if nothing can be scored.
    """
    files = [Answers(path) for path in paths]
    copy = LongBench(folder or Path(files[0].last["longbench"]))
    tried = set().union(*(one.tried for one in files))
    names = sorted({key[0] for key in tried}, key=lambda x: ([*PAPER_SETS, x].index(x), x))
    questions = [q for name in names for q in copy.questions(name)]
    common = [q for q in questions if all(q.key in one.ok for one in files)]
    if not common:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: no question of {copy.folder} is answered in every file"
        )
    for q in common:
        if len({one.ok[q.key]["prompt_sha"] for one in files}) > 1:
            raise ConfigError(
                f"{', '.join(map(str, paths))}: {q.set_name}, row {q.id} was asked with different "
                "prompts; give all runs the same --max-prompt-tokens, --chat and --tokenizer"
            )
    return _markdown(files, _scores(files, common, copy), len(tried) - len(common))


def _scores(
    files: Sequence[Answers], common: Sequence[Question], copy: LongBench
) -> dict[tuple[str, str], np.ndarray]:
    """Points [files, questions] by name and metric of the set."""
    metrics, found = copy.metrics(), {}
    for name in dict.fromkeys(q.set_name for q in common):
        metric, mine = metrics[name], [q for q in common if q.set_name == name]
        values = [[points(metric, q, one.ok[q.key]["text"]) for q in mine] for one in files]
        found[name, metric.__name__] = np.array(values)
    return found


def _markdown(
    files: Sequence[Answers], scores: dict[tuple[str, str], np.ndarray], left_out: int
) -> str:
    labels = [one.last["impl"] for one in files]
    head = ["set", "metric", "questions", *labels, *(f"{x} − {labels[0]}" for x in labels[1:])]
    lines = []
    each = [(names, [found]) for names, found in scores.items()]
    for names, used in [*each, (("mean", ""), [*scores.values()])]:
        cells = [_cell([x[at] for x in used]) for at in range(len(files))]
        cells += [_cell([x[at] - x[0] for x in used], "+") for at in range(1, len(files))]
        lines.append([*names, str(sum(x.shape[1] for x in used)), *cells])
    notes = [
        "Points of LongBench's own metrics, 0 to 100; every set counts alike in the mean. In brackets: 95 % intervals, "
        f"bootstrap over the questions of each set ({RESAMPLES} draws, seed {SEED}), too narrow with fewer than 30; "
        "differences are paired by question."
    ]
    for one in files:
        cut = sum(row["cut_tokens"] > 0 for row in one.ok.values())
        notes.append(
            f"{one.last['impl']}: model {one.last['model']}, {one.last['time_utc'][:10]}, {cut} of {len(one.ok)} "
            f"prompts cut in the middle to {one.last['max_prompt_tokens']} tokens."
        )
    if left_out:
        notes.append(
            f"**Not in the table:** {left_out} questions that a file lacks, that failed or whose data have changed "
            "since. Run again into the same file."
        )
    return markdown_table(head, lines) + "\n\n" + "".join(f"- {note}\n" for note in notes)
