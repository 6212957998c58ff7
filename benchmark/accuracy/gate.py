"""Accuracy gate: scout against full attention. Exit code 0 if scout is within the margin at every budget, else 1.

    python -m benchmark.accuracy.gate [--short] [--json FILE]

Two models are used (JUDGES): the retrieval model of this folder, on the tasks of tasks.py, and SmolLM2-135M-Instruct,
on facts planted in real text (planted.py). Each is tested with one policy of policies.py.

Full attention, in plain PyTorch (plain_answers.py), and servers of scout answer the same questions, so the loss is
paired by sample: answers that only full has right, minus those that only scout has right. A budget fails when its loss
exceeds its margin.

The default margin follows from the allowed loss (ALLOWED_POINTS) and the sample size: a policy that loses exactly the
allowed amount fails with a probability of at most 5 %, and the power to detect a larger loss grows with the sample
size. --margin-points sets one margin for all budgets instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.accuracy.policies import Setting
from benchmark.accuracy.scoring import Loss, margin_points, paired_loss
from benchmark.accuracy.suite import (
    FULL_SETTING,
    run_settings,
    suite_arguments,
    suite_file,
)
from benchmark.progress import Progress
from benchmark.rows import Row, argument_parser
from servers.server_process import ends_orderly
from sglang_scout.cli import columns

HELD_OUT = 21
"""First document of the gate; those of the suite and the study precede it."""

ALLOWED_POINTS = {512: 2.5, 1024: 1.0, 2048: 0.3}
"""Allowed loss in points by budget; at 512 that of the paper at 1024."""


@dataclass(frozen=True)
class Form:
    """``samples`` per length and task."""

    budgets: tuple[int, ...]
    lengths: tuple[int, ...]
    samples: int


@dataclass(frozen=True)
class Judge:
    """A model with its questions and the policy under test; ``seed`` of the first sample."""

    questions: str
    policy: str
    long: Form
    short: Form
    seed: int | None = None


ROTATED = "scout-rotated"
SHORT = Form((1024,), (2048,), 2)
TASKS, PLANTED = Form((512, 1024, 2048), (4096,), 24), Form((512, 1024), (4096,), 12)
JUDGES = {
    "recall": Judge("tasks", f"{ROTATED}+exact_layers=[1]", TASKS, SHORT),
    "smollm2": Judge("planted", ROTATED, PLANTED, SHORT, HELD_OUT),
}


@dataclass(frozen=True)
class Verdict:
    """The verdict on one setting. ``full_right`` and ``right`` are shares."""

    setting: Setting
    full_right: float
    right: float
    loss: Loss
    margin_points: float

    @property
    def passed(self) -> bool:
        return self.loss.points <= self.margin_points


def judge(setting: Setting, full: Sequence[bool], other: Sequence[bool], margin: float) -> Verdict:
    """Raises ValueError for answers to different questions."""
    share = sum(full) / len(full), sum(other) / len(other)
    return Verdict(setting, *share, paired_loss(full, other), margin)


def outcomes(rows: Sequence[Row], setting: Setting) -> list[bool]:
    """Outcomes of all lengths and tasks, in the order of the rows."""
    wanted = setting.policy, setting.budget_tokens
    mine = [row for row in rows if (row["policy"], row["budget_tokens"]) == wanted]
    mine.sort(key=lambda row: (row["length_tokens"], row["task"]))
    return [x == "1" for row in mine for x in row["outcomes"]]


def report(verdicts: Sequence[Verdict]) -> str:
    lines = [["", "full", "other", "lost", "gained", "loss", "95 % interval", "margin", ""]]
    for v in verdicts:
        low, high = v.loss.interval_points
        cells = [v.setting.name, f"{v.full_right:.1%}", f"{v.right:.1%}"]
        cells += [str(v.loss.lost), str(v.loss.gained), f"{v.loss.points:.2f} points"]
        cells += [f"{low:.1f} to {high:.1f}", f"{v.margin_points:.2f}"]
        lines.append([*cells, "pass" if v.passed else "FAIL"])
    asked = ", ".join(str(v.loss.asked) for v in verdicts)
    return f"{columns(lines)}\nof {asked} questions; a loss above its margin fails"


def run(args: argparse.Namespace, judge_: Judge, progress: Progress) -> list[Verdict]:
    form = judge_.short if args.short else judge_.long
    args = suite_arguments(
        ["--samples", str(form.samples)],
        json=args.json,
        seed=judge_.seed,
        questions=judge_.questions,
        lengths=list(form.lengths),
        margin_points=args.margin_points,
    )
    settings = [Setting(judge_.policy, budget) for budget in form.budgets]
    file = suite_file(args)
    run_settings(args, [FULL_SETTING, *settings], file, progress)
    full, verdicts = outcomes(file.rows, FULL_SETTING), []
    for budget, setting in zip(form.budgets, settings, strict=True):
        margin = args.margin_points
        if margin is None:
            margin = margin_points(ALLOWED_POINTS[budget], len(full))
        verdicts.append(judge(setting, full, outcomes(file.rows, setting), margin))
    return verdicts


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--short", action="store_true", help="one budget and length, few samples; for tests")
    add("--models", nargs="+", choices=JUDGES, default=list(JUDGES), help="models to test with")
    add("--margin-points", type=float, metavar="X", help="allowed loss at every budget")
    add("--json", type=Path, metavar="FILE", help="write one row per line to FILE, replacing it")
    args = parser.parse_args(argv)
    if args.json:
        args.json.unlink(missing_ok=True)
    passed = True
    with ends_orderly():
        for name in args.models:
            verdicts = run(args, JUDGES[name], Progress())
            print(f"{name}\n{report(verdicts)}\n", flush=True)
            passed &= all(v.passed for v in verdicts)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
