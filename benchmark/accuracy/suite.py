"""How many questions about long texts are answered right, by policy, budget, length and task.

    python benchmark/accuracy/suite.py --grid --json docs/results/accuracy.jsonl
    python benchmark/accuracy/suite.py --base-url URL --policy scout --budget 1024 --json FILE
    python benchmark/accuracy/table.py docs/results/accuracy.jsonl
    python benchmark/plot.py docs/results/accuracy.jsonl

The tasks are those of tasks.py, in the manner of RULER, for the retrieval model: each sample is a text of its own with
one question, so samples are independent. With --questions planted they are those of planted.py, for SmolLM2: a sample
is a document, and all questions of all lengths are about the same ones. All policies get the same samples. An answer
counts if every token, or every planted number, is right. With --grid the servers
are started here, a few at a time (--at-once), and all of them are asked about a text while the prefill server still has
it. --base-url asks a server or router that runs already, one whose model knows these tokens.

With --grid a decode server has one request at a time, and its device cache room for the budget of one and three pages
(the tail and the least that `resident_tokens` can be, see --config). With room for more, a request would attend to all
that fits, and with several at a time that would depend on who else runs.

The same command again goes on where it stopped: rows that are in the file are not measured again. A row is one setting
at one length and task:
    policy, budget_tokens (null for full), length_tokens, task, right, asked; low, high: 95 % interval
    outcomes             a character for each sample, 1 for a right answer: policies can be compared by sample
    seconds              the sum over the requests; whoever asks first about a text pays for the prefill
    cpu_compute_ratio    pages computed on the CPU over the budget, in this row; null for full
    offload              the server's other counters, the difference over this row
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from asking import Servers, Tally, ask_all  # noqa: E402
from fleet import Fleet, OneServer  # noqa: E402
from policies import FULL, NAMES, Setting, grid  # noqa: E402
from questions import FORCING_ENVIRONMENT, FORCING_FLAGS, SOURCES  # noqa: E402
from row_file import RowFile  # noqa: E402

from progress import Progress  # noqa: E402
from rows import Row, environment  # noqa: E402
from servers.server_process import ends_orderly  # noqa: E402

BENCHMARK = "accuracy"
PACKAGES = ("sglang", "torch", "sglang-scout")
BUDGETS = (256, 512, 1024, 2048)


def measure(
    servers: Servers,
    settings: Sequence[Setting],
    args: argparse.Namespace,
    file: RowFile,
    progress: Progress,
) -> None:
    """All lengths and tasks for these settings, leaving out what the file has."""
    for length in args.lengths:
        for task in args.tasks:
            place = {"length_tokens": length, "task": task}
            missing = [s for s in settings if not file.has(**key_of(s), **place)]
            if not missing:
                continue
            progress.update(f"{length} tokens, {task}")
            begin = time.monotonic()
            tallies = [Tally(s, args.samples, servers.counters(s)) for s in missing]
            samples = [
                SOURCES[args.questions].sample(task, length, args.seed + i)
                for i in range(args.samples)
            ]
            ask_all(servers, tallies, samples, args.through, args.in_flight)
            for tally in tallies:
                found = tally.row(servers.counters(tally.setting))
                file.add(tally.setting.policy, **key_of(tally.setting), **place, **found)
            scores = ", ".join(f"{t.setting.name} {sum(map(bool, t.outcomes))}" for t in tallies)
            progress.say(
                f"{length} tokens, {task}, of {args.samples}: {scores}; "
                f"{time.monotonic() - begin:.0f} s"
            )


def key_of(setting: Setting) -> Row:
    return {"policy": setting.policy, "budget_tokens": setting.budget_tokens}


def groups_of(settings: Sequence[Setting], at_once: int) -> list[list[Setting]]:
    return [list(settings[i : i + at_once]) for i in range(0, len(settings), at_once)]


def run_grid(args: argparse.Namespace, file: RowFile, progress: Progress) -> None:
    for group in groups_of(grid(args.policies, args.budgets), args.at_once):
        missing = [
            setting
            for setting in group
            if any(
                not file.has(**key_of(setting), length_tokens=length, task=task)
                for length in args.lengths
                for task in args.tasks
            )
        ]
        if not missing:
            continue
        progress.say(f"starting servers for {', '.join(s.name for s in missing)}")
        file.renew(environment(BENCHMARK, PACKAGES))
        with start_fleet(args, missing, max(args.lengths)) as fleet:
            progress.say(f"ready after {fleet.startup_s:.0f} s")
            measure(fleet, missing, args, file, progress)


def start_fleet(
    args: argparse.Namespace, settings: Sequence[Setting], longest_tokens: int
) -> Fleet:
    return Fleet(
        args.model_path,
        settings,
        dtype=args.dtype,
        longest_tokens=longest_tokens + 128,
        server_flags=FORCING_FLAGS if args.through == "decode" else (),
        environment={"OMP_NUM_THREADS": str(args.threads), **FORCING_ENVIRONMENT},
        config=args.config,
    )


def add_common_arguments(
    parser: argparse.ArgumentParser, existing: str = "is gone on with"
) -> None:
    """What the suite and the gate share; ``existing``: what becomes of a file that is there."""
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help=f"one row a line; an existing file {existing}")
    add("--model-path", help="folder of the model (default: the one that can answer them)")
    add("--dtype", help="default: the model's")
    add("--seed", type=int, help="of the first sample")
    add("--threads", type=int, default=1, help="of each server")
    add(
        "--config",
        type=json.loads,
        default={"resident_tokens": 32},
        metavar="JSON",
        help="more keys for all policies (default: %(default)s)",
    )


def complete(args: argparse.Namespace, questions: str) -> None:
    """What was left out is as it suits ``questions``."""
    source = SOURCES[questions]
    args.questions = questions
    args.model_path = args.model_path or str(source.model())
    for name, value in (
        ("dtype", source.dtype),
        ("seed", source.first_seed),
        ("lengths", list(source.lengths)),
        ("tasks", list(source.tasks)),
    ):
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def shared_fields(args: argparse.Namespace) -> Row:
    from recall_modes import weights_digest

    return {
        "untimed": True,
        "model": Path(args.model_path).name,
        "weights": weights_digest(args.model_path),
        "dtype": args.dtype,
        "seed": args.seed,
        "through": args.through,
        "config": args.config,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--grid", action="store_true", help="start servers for all settings here")
    add("--base-url", metavar="URL", help="ask this server or router")
    add("--policy", choices=NAMES, default=FULL, help="of --base-url's server, a label")
    add("--budget", type=int, metavar="TOKENS", help="of --base-url's server, a label")
    add("--policies", nargs="+", default=list(NAMES), help="see policies.py")
    add("--budgets", nargs="+", type=int, default=list(BUDGETS), metavar="TOKENS")
    add("--questions", choices=SOURCES, default="tasks")
    add("--lengths", nargs="+", type=int, metavar="TOKENS")
    add("--tasks", nargs="+", choices=[task for s in SOURCES.values() for task in s.tasks])
    add("--samples", type=int, default=25, help="of each length and task")
    add("--at-once", type=int, default=6, metavar="SERVERS", help="settings started together")
    add(
        "--through",
        choices=("decode", "prompt", "text"),
        default="decode",
        help="decode: the decode server reads the question (needs --grammar-backend llguidance); "
        "prompt: it is in the prompt; text: the same as words, for other tokenizers",
    )
    add("--in-flight", type=int, default=8, metavar="N", help="requests at a time, of --base-url")
    add_common_arguments(parser)
    args = parser.parse_args(argv)
    complete(args, args.questions)
    if args.grid:
        args.in_flight = 1
    if args.grid == bool(args.base_url):
        parser.error("give either --grid or --base-url URL")
    progress = Progress()
    key = ("policy", "budget_tokens", "length_tokens", "task")
    fields = {**shared_fields(args), "samples": args.samples}
    file = RowFile(args.json, environment(BENCHMARK, PACKAGES), fields, key)
    with ends_orderly():
        if args.grid:
            run_grid(args, file, progress)
        else:
            setting = Setting(args.policy, args.budget)
            measure(OneServer(args.base_url), [setting], args, file, progress)
    return 0


if __name__ == "__main__":
    sys.exit(main())
