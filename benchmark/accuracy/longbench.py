#!/usr/bin/env python3
"""LongBench with your model and your copy of LongBench, against any SGLang server or router.

    benchmark/accuracy/longbench.py --longbench DIR --base-url URL --label NAME --output FILE.jsonl
    benchmark/accuracy/longbench.py compare STOCK.jsonl OTHER.jsonl [OTHER.jsonl ...]
    benchmark/accuracy/longbench.py score FILE.jsonl

The first asks the paper's eight sets and writes every answer as it comes; the same command again goes on where it
stopped, and asks what failed once more. It exits with 1 where answers are missing. ``compare`` takes the stock server's
file first. Needs LongBench's repository and data (longbench_data.py says how they lie); scoring runs LongBench's own
metrics.py.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from longbench_answers import AnswerFile, Answers, Settings, read_answers  # noqa: E402
from longbench_compare import (  # noqa: E402
    RESAMPLES,
    SEED,
    differences,
    find_copy,
    markdown,
    notes,
    score_sets,
)
from longbench_data import PAPER_SETS, LongBench, Question  # noqa: E402
from longbench_prompts import CHAT_CHOICES, Encoder, sampling_for  # noqa: E402
from longbench_run import Tally, ask, ask_server, run_questions  # noqa: E402

from rows import Row, Writer, environment  # noqa: E402
from sglang_scout.cli.progress import Progress  # noqa: E402
from sglang_scout.cli.table import columns  # noqa: E402
from sglang_scout.core.errors import ConfigError, ScoutError  # noqa: E402

BENCHMARK = "longbench"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; give a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds above 0, as 1800")
    return value


def run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longbench.py", description="Ask LongBench's questions; 'compare' and 'score' follow."
    )
    add = parser.add_argument
    add("--longbench", type=Path, required=True, metavar="DIR", help="copy of its repository")
    add("--data", type=Path, metavar="DIR", help="where data.zip was unpacked, if not in the copy")
    add("--base-url", required=True, metavar="URL", help="SGLang server or router")
    add("--label", required=True, help="name of what is served, for tables")
    add("--output", type=Path, required=True, metavar="FILE", help="answers, JSON lines")
    add("--sets", nargs="+", default=list(PAPER_SETS), metavar="SET", help="default: the paper's")
    add("--limit", type=_count, metavar="N", help="only the first N questions of each set")
    add("--concurrency", type=_count, default=16, metavar="N", help="requests at a time")
    add("--tokenizer", metavar="DIR", help="default: the one that the server names")
    add(
        "--max-prompt-tokens",
        type=_count,
        metavar="N",
        help="longer prompts lose their middle; default: what the context leaves",
    )
    add("--chat", choices=CHAT_CHOICES, default="auto", help="off: no template, for base models")
    add("--tries", type=_count, default=4, metavar="N", help="of each request")
    add("--timeout-s", type=_seconds, default=1800.0, metavar="S", help="of each try")
    return parser


def files_parser(name: str, files: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"longbench.py {name}")
    add = parser.add_argument
    add("files", nargs=files, type=Path, metavar="FILE")
    add("--longbench", type=Path, metavar="DIR", help="default: the copy of the first file's run")
    add("--data", type=Path, metavar="DIR", help="where data.zip was unpacked, if not in the copy")
    if name == "compare":
        add("--output", type=Path, metavar="FILE", help="default: the last file's name with .md")
        add("--json", type=Path, metavar="FILE", help="the table as rows")
    return parser


def command_run(arguments: Sequence[str]) -> int:
    args = run_parser().parse_args(arguments)
    base_url = args.base_url.rstrip("/")
    progress = Progress()
    copy = LongBench(args.longbench, args.data)
    names = list(dict.fromkeys(args.sets))
    copy.check_sets(names)
    digests = {name: copy.digest(name) for name in names}
    questions = [q for name in names for q in copy.questions(name, args.limit)]
    absent = copy.absent_packages()
    if absent:
        progress.say(
            f"scoring will need {', '.join(absent)} (pip install {' '.join(absent)}); asking "
            "does not"
        )
    served = ask_server(base_url)
    encoder = Encoder(
        args.tokenizer or served.tokenizer,
        chat=args.chat,
        context_tokens=served.context_tokens,
        longest_answer_tokens=copy.longest_answer_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
    )
    file = AnswerFile(args.output)
    try:
        shared = {
            **environment(BENCHMARK, ["transformers"]),
            "model": served.model,
            "base_url": base_url,
            "longbench": str(args.longbench.resolve()),
            "data": str(args.data.resolve()) if args.data else "",
        }
        settings = Settings(
            args.label, served.model, args.chat, encoder.max_prompt_tokens, encoder.sha
        )
        file.begin(shared, settings, digests)
        left = [q for q in questions if not file.done((q.set_name, q.key))]
        progress.say(
            f"{len(left)} of {len(questions)} questions to ask, {args.concurrency} at a time; "
            f"prompts up to {encoder.max_prompt_tokens} tokens"
        )

        def make_row(question: Question, stop: threading.Event) -> Row:
            return ask(
                base_url,
                encoder.encode(question),
                copy.max_new_tokens(question.set_name),
                sampling_for(question.set_name, encoder.newline_id),
                tries=args.tries,
                timeout_s=args.timeout_s,
                stop=stop,
            )

        tally = run_questions(left, make_row, file, concurrency=args.concurrency, progress=progress)
    finally:
        file.close()
    return _finish_run(args, tally, absent, progress)


def _finish_run(
    args: argparse.Namespace, tally: Tally, absent: Sequence[str], progress: Progress
) -> int:
    """Say how it went and, where all is there, the scores. 0 if every question is answered."""
    answered = tally.done - tally.failed
    progress.say(f"{answered} answered, {tally.failed} failed, in {args.output}")
    if answered < tally.total:
        why = tally.stopped or f"{tally.failed} failed"
        last = f"; the last said: {tally.last_reason}" if tally.last_reason else ""
        print(
            f"longbench.py: {tally.total - answered} questions have no answer ({why}{last}). "
            "The same command again asks only those.",
            file=sys.stderr,
        )
        return 1
    if absent:
        print(
            f"All answers are in {args.output}. For scores: pip install {' '.join(absent)}, then "
            f"longbench.py score {args.output}"
        )
        return 0
    _print_scores(args.output, args.longbench, args.data)
    return 0


def _print_scores(path: Path, folder: Path | None, data: Path | None) -> None:
    answers = read_answers(path)
    sets = score_sets([answers], find_copy([answers], folder, data))
    used = [one for one in sets if one.points.shape[1]]
    lines = [["set", "metric", "questions", answers.label]]
    for one in used:
        count = one.points.shape[1]
        lines.append([one.name, one.metric, str(count), f"{one.points.mean():.2f}"])
    total = sum(one.points.shape[1] for one in used)
    mean = sum(float(one.points.mean()) for one in used) / len(used)
    lines.append(["mean", "", str(total), f"{mean:.2f}"])
    print(columns(lines, right=(2, 3)))
    print(notes([answers], sets))


def command_score(arguments: Sequence[str]) -> int:
    args = files_parser("score", "+").parse_args(arguments)
    for path in args.files:
        _print_scores(path, args.longbench, args.data)
    return 0


def command_compare(arguments: Sequence[str]) -> int:
    args = files_parser("compare", "+").parse_args(arguments)
    if len(args.files) < 2:
        raise ConfigError(
            f"compare {args.files[0]}: one file; give the stock server's file, then others "
            "('score' is for one)"
        )
    output = args.output or args.files[-1].with_suffix(".md")
    if output.suffix == ".jsonl" or output in args.files:
        raise ConfigError(f"--output {output}: would write over answers; name a .md file")
    files: list[Answers] = [read_answers(path) for path in args.files]
    sets = score_sets(files, find_copy(files, args.longbench, args.data))
    text = markdown(files, sets)
    print(text, end="")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(f"\nwritten to {output}", file=sys.stderr)
    if args.json is not None:
        writer = Writer(args.json, environment(BENCHMARK, ["numpy"]))
        counts = {one.name: one.points.shape[1] for one in sets}
        left_out = {one.name: one.left_out for one in sets}
        for number, file in enumerate(files[1:], 1):
            for change in differences(sets, number):
                name = change.set_name
                writer.add(
                    file.label,
                    untimed=True,
                    model=file.runs[-1]["model"],
                    settings=file.runs[-1]["settings"],
                    set=name,
                    questions=counts.get(name, sum(counts.values())),
                    left_out=left_out.get(name, sum(left_out.values())),
                    score=round(change.score, 4),
                    baseline=files[0].label,
                    baseline_score=round(change.baseline, 4),
                    difference=round(change.difference, 4),
                    interval=[change.low, change.high],
                    resamples=RESAMPLES,
                    seed=SEED,
                )
        writer.close()
    return 0


COMMANDS = {"compare": command_compare, "score": command_score}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in COMMANDS:
            return COMMANDS[arguments[0]](arguments[1:])
        return command_run(arguments)
    except ScoutError as error:
        print(f"longbench.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
