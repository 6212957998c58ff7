"""Does scout answer as well as full attention? Exit code 0 if it does at every budget, 1 if not.

    python benchmark/accuracy/gate.py [--json FILE]

"scout" is the policy `scout-signs` of policies.py, what suits the model in this folder, or another by --policy.

Full attention and scout answer the same questions, so the loss is counted by sample: answers that only full has right,
less those that only scout has right. A budget fails when its loss exceeds its margin.

The default margin follows from what is allowed to be lost (ALLOWED_POINTS) and the size of the sample: a policy that
loses exactly as much as is allowed fails with a probability of 5 % at most, and one that loses more fails the more
surely, the larger the sample. --margin-points sets one margin for all budgets instead.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import tasks  # noqa: E402
from policies import FULL, NAMES, Setting  # noqa: E402
from row_file import RowFile  # noqa: E402
from scoring import Loss, margin_points, paired_loss  # noqa: E402
from suite import (  # noqa: E402
    BENCHMARK,
    PACKAGES,
    add_common_arguments,
    measure,
    shared_fields,
    start_fleet,
)

from rows import Row, environment  # noqa: E402
from sglang_scout.cli.profile_run import ends_orderly  # noqa: E402
from sglang_scout.cli.progress import Progress  # noqa: E402
from sglang_scout.cli.table import columns  # noqa: E402

ALLOWED_POINTS = {512: 2.5, 1024: 1.0, 2048: 0.3}
"""Points that may be lost by budget: at 2048 and 1024 the goals of docs/results/accuracy.md; at 512 what the paper
loses at 1024."""

SHORT_BUDGETS = (1024,)
LENGTHS, SHORT_LENGTHS = (4096,), (2048,)
SAMPLES, SHORT_SAMPLES = 24, 4


@dataclass(frozen=True)
class Verdict:
    """Of one budget. ``full_right`` and ``right`` are shares."""

    budget_tokens: int
    full_right: float
    right: float
    loss: Loss
    margin_points: float

    @property
    def passed(self) -> bool:
        return self.loss.points <= self.margin_points


def judge(
    full: Sequence[bool],
    by_budget: Mapping[int, Sequence[bool]],
    margin: float | None,
) -> list[Verdict]:
    """A verdict for each budget; ``margin`` in points, None for the default.

    Raises ValueError for a budget without a default, and for answers to different questions.
    """
    verdicts = []
    for budget, other in by_budget.items():
        loss = paired_loss(full, other)
        if margin is None and budget not in ALLOWED_POINTS:
            raise ValueError(
                f"budget {budget} has no default margin (those of {list(ALLOWED_POINTS)} have); "
                "give --margin-points"
            )
        allowed = margin_points(ALLOWED_POINTS[budget], loss.asked) if margin is None else margin
        share = sum(full) / len(full), sum(other) / len(other)
        verdicts.append(Verdict(budget, *share, loss, allowed))
    return verdicts


def outcomes(rows: Sequence[Row], setting: Setting) -> list[bool]:
    """Of all lengths and tasks, in the order of the rows."""
    mine = [
        row
        for row in rows
        if (row["policy"], row["budget_tokens"]) == (setting.policy, setting.budget_tokens)
    ]
    mine.sort(key=lambda row: (row["length_tokens"], row["task"]))
    return [x == "1" for row in mine for x in row["outcomes"]]


def report(verdicts: Sequence[Verdict]) -> str:
    lines = [["budget", "full", "other", "lost", "gained", "loss", "95 % interval", "margin", ""]]
    for v in verdicts:
        low, high = v.loss.interval_points
        lines.append(
            [
                str(v.budget_tokens),
                f"{v.full_right:.1%}",
                f"{v.right:.1%}",
                str(v.loss.lost),
                str(v.loss.gained),
                f"{v.loss.points:.2f} points",
                f"{low:.1f} to {high:.1f}",
                f"{v.margin_points:.2f}",
                "pass" if v.passed else "FAIL",
            ]
        )
    asked = verdicts[0].loss.asked
    return f"{columns(lines)}\nof {asked} questions; a loss above its margin fails"


def run(args: argparse.Namespace, file: RowFile, progress: Progress) -> list[Verdict]:
    settings = [Setting(FULL), *(Setting(args.policy, budget) for budget in args.budgets)]
    progress.say(f"starting servers for {', '.join(s.name for s in settings)}")
    with start_fleet(args, settings) as fleet:
        progress.say(f"ready after {fleet.startup_s:.0f} s")
        measure(fleet, settings, args, file, progress)
    answers = {s.budget_tokens or 0: outcomes(file.rows, s) for s in settings}
    return judge(answers.pop(0), answers, args.margin_points)


def _margin(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no margin; give points from 0 to below 100")
    return value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--short", action="store_true", help="one budget and length, few samples; for tests")
    add("--policy", choices=NAMES[1:], default="scout-signs", help="compared with full attention")
    add("--margin-points", type=_margin, metavar="X", help="may be lost at every budget")
    add("--budgets", nargs="+", type=int, metavar="TOKENS", help="default: 512 1024 2048")
    add("--lengths", nargs="+", type=int, metavar="TOKENS")
    add("--samples", type=int, help="of each length and task")
    add_common_arguments(parser, existing="is overwritten")
    args = parser.parse_args(argv)
    args.budgets = args.budgets or list(SHORT_BUDGETS if args.short else ALLOWED_POINTS)
    args.lengths = args.lengths or list(SHORT_LENGTHS if args.short else LENGTHS)
    args.samples = args.samples or (SHORT_SAMPLES if args.short else SAMPLES)
    args.tasks, args.through, args.in_flight = list(tasks.TASKS), "decode", 1
    if args.margin_points is None and not set(args.budgets) <= set(ALLOWED_POINTS):
        parser.error(f"--margin-points is needed for budgets other than {list(ALLOWED_POINTS)}")
    key = ("policy", "budget_tokens", "length_tokens", "task")
    fields = {**shared_fields(args), "samples": args.samples}
    file = RowFile(args.json, environment(BENCHMARK, PACKAGES), fields, key, anew=True)
    with ends_orderly():
        verdicts = run(args, file, Progress())
    print(report(verdicts))
    return 0 if all(v.passed for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
