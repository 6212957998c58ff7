"""Accuracy on questions about long texts, by policy, budget, length and task.

    python -m benchmark.accuracy.suite --json FILE.jsonl

The tasks are those of tasks.py, similar to RULER, for the retrieval model: each sample is a separate text with one
question, so samples are independent. With --questions planted they are those of planted.py, for SmolLM2: a sample is a
document, and all questions of all lengths are about the same documents. All policies get the same samples. An answer
counts if every token, or every planted number, is correct. Full attention is computed by plain_answers.py. The servers
of the others are started here, a few at a time (--at-once), and all of them are asked about a text while the prefill
server still has it cached. A decode server runs one request at a time, and its device cache holds the budget of one
plus three pages (the tail and the minimum of `resident_tokens`, see --config). With more room, fewer pages would be
left to the CPU, and with concurrent requests that would depend on the others.

Rerunning the command resumes where it stopped: rows that are in the file are not measured again. A row is one setting
at one length and task:
    policy, budget_tokens (null for full), length_tokens, task, right, asked; low, high: 95 % interval
    outcomes             one character per sample, 1 for a correct answer, for paired comparisons of policies
    seconds              sum over the requests; the first request about a text includes the prefill; 0 for full
    cpu_compute_ratio    pages computed on the CPU over the budget, in this row; null for full
    offload              the server's other counters, the difference over this row
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from benchmark.accuracy import tasks
from benchmark.accuracy.fleet import Fleet
from benchmark.accuracy.plain_answers import PlainAnswers
from benchmark.accuracy.policies import FULL, NAMES, Setting, grid
from benchmark.accuracy.questions import SOURCES, is_right, payload
from benchmark.accuracy.scoring import wilson_interval
from benchmark.progress import Progress
from benchmark.rows import Row, RowFile, argument_parser, environment, weights_digest
from servers.server_process import ends_orderly

BENCHMARK = "accuracy"
PACKAGES = ("sglang", "torch", "sglang-scout")
FULL_SETTING = Setting(FULL)
BUDGETS = (256, 512, 1024, 2048)
COUNTED = """steps selected_pages cpu_pages fetched_pages budget_pages recalled_pages recall_bytes
    fallback_pages gpu_wait_us""".split()


class Servers(Protocol):
    def ask(self, setting: Setting, payload: dict[str, Any]) -> dict[str, Any]: ...

    def counters(self, setting: Setting) -> dict[str, Any]: ...


class Tally:
    """Answers of one setting for one length and task so far."""

    def __init__(self, setting: Setting, samples: int, before: dict[str, Any]) -> None:
        self.setting = setting
        self.outcomes: list[bool | None] = [None] * samples
        self.seconds = 0.0
        self._before = before

    def row(self, after: dict[str, Any]) -> Row:
        right, asked = sum(map(bool, self.outcomes)), len(self.outcomes)
        low, high = wilson_interval(right, asked)
        spent = {key: after[key] - self._before[key] for key in COUNTED if key in after}
        budget = spent.get("budget_pages")
        return {
            "right": right,
            "asked": asked,
            "low": round(low, 5),
            "high": round(high, 5),
            "outcomes": "".join("1" if x else "0" for x in self.outcomes),
            "seconds": round(self.seconds, 2),
            "cpu_compute_ratio": round(spent["cpu_pages"] / budget, 5) if budget else None,
            "offload": spent,
        }


def ask_all(servers: Servers, tallies: Sequence[Tally], samples: Sequence[tasks.Sample]) -> None:
    """Asks sample by sample, each with all settings in turn, so that a text is prefilled once and reused while still
    cached. Raises ValueError, RequestFailed, OSError or ServerFailed for the first request that fails.
    """
    for index, sample in enumerate(samples):
        for tally in tallies:
            begin = time.monotonic()
            answer = servers.ask(tally.setting, payload(sample))
            tally.seconds += time.monotonic() - begin
            tally.outcomes[index] = is_right(sample, answer)


def measure(
    servers: Servers,
    settings: Sequence[Setting],
    args: argparse.Namespace,
    file: RowFile,
    progress: Progress,
) -> None:
    """All lengths and tasks for these settings, skipping those in the file."""
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
            if args.through == "prompt":
                samples = [replace(sample, question_tokens=0) for sample in samples]
            ask_all(servers, tallies, samples)
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


def ask_full(args: argparse.Namespace, file: RowFile, progress: Progress) -> None:
    """Rows of full attention, grouped by text, as tasks may share one."""
    plain = PlainAnswers(args.model_path)
    for length in args.lengths:
        place = {**key_of(FULL_SETTING), "length_tokens": length}
        missing = [task for task in args.tasks if not file.has(**place, task=task)]
        tallies = {task: Tally(FULL_SETTING, args.samples, {}) for task in missing}
        for i in range(args.samples):
            progress.update(f"full attention, {length} tokens, sample {i + 1}")
            for task, tally in tallies.items():
                sample = SOURCES[args.questions].sample(task, length, args.seed + i)
                tally.outcomes[i] = plain.is_right(sample)
        for task, tally in tallies.items():
            file.add(FULL, **place, task=task, **tally.row({}))
        right = ", ".join(f"{task} {sum(map(bool, t.outcomes))}" for task, t in tallies.items())
        progress.say(f"full attention, {length} tokens, of {args.samples}: {right}")


def run_settings(
    args: argparse.Namespace, settings: Sequence[Setting], file: RowFile, progress: Progress
) -> None:
    """Runs the settings with missing rows, those on servers ``--at-once`` at a time."""
    places = [{"length_tokens": length, "task": t} for length in args.lengths for t in args.tasks]
    todo = [s for s in settings if not all(file.has(**key_of(s), **place) for place in places)]
    if FULL_SETTING in todo:
        todo.remove(FULL_SETTING)
        ask_full(args, file, progress)
    of_prefill = [[s for s in todo if s.prefill_policy == policy] for policy in ("scout", "hgca")]
    for group in (
        x[i : i + args.at_once] for x in of_prefill for i in range(0, len(x), args.at_once)
    ):
        progress.say(f"starting servers for {', '.join(s.name for s in group)}")
        file.renew(environment(BENCHMARK, PACKAGES))
        with Fleet(group, args) as fleet:
            progress.say(f"ready after {fleet.startup_s:.0f} s")
            measure(fleet, group, args, file, progress)


def suite_file(args: argparse.Namespace) -> RowFile:
    fields = {
        "untimed": True,
        "model": Path(args.model_path).name,
        "weights": weights_digest(args.model_path),
        "dtype": args.dtype,
        "seed": args.seed,
        "through": args.through,
        "config": args.config,
        "samples": args.samples,
    }
    return RowFile(args.json, environment(BENCHMARK, PACKAGES), fields)


def suite_arguments(argv: list[str] | None, **given: Any) -> argparse.Namespace:
    """The suite's arguments. ``given`` overrides parsed values; defaults depend on the kind of questions."""
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write one row per line to FILE, or continue it")
    add("--policies", nargs="+", default=list(NAMES), help="see policies.py")
    add("--budgets", nargs="+", type=int, default=list(BUDGETS), metavar="TOKENS")
    add("--questions", choices=SOURCES, default="tasks")
    add("--lengths", nargs="+", type=int, metavar="TOKENS")
    add("--tasks", nargs="+", choices=[task for s in SOURCES.values() for task in s.tasks])
    text = (
        "which server reads the question: the prefill server, in the prompt, or the decode server"
    )
    add("--through", choices=("decode", "prompt"), default="decode", help=text)
    add("--samples", type=int, default=25, help="samples per length and task")
    add("--seed", type=int, help="seed of the first sample")
    add("--at-once", type=int, default=6, metavar="SERVERS", help="settings that run concurrently")
    add("--threads", type=int, default=1, help="threads per server")
    config, text = {"resident_tokens": 32}, "more keys for all policies"
    add("--config", type=json.loads, default=config, metavar="JSON", help=text)
    args = parser.parse_args(argv)
    vars(args).update(given)
    source = SOURCES[args.questions]
    args.model_path, args.dtype = str(source.model()), source.dtype
    args.seed = source.first_seed if args.seed is None else args.seed
    args.lengths = args.lengths or list(source.lengths)
    args.tasks = args.tasks or list(source.tasks)
    return args


def main(argv: list[str] | None = None) -> int:
    args = suite_arguments(argv)
    with ends_orderly():
        run_settings(args, grid(args.policies, args.budgets), suite_file(args), Progress())
    return 0


if __name__ == "__main__":
    sys.exit(main())
