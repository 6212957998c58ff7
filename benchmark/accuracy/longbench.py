#!/usr/bin/env python3
"""LongBench with your model and your copy of LongBench, against any SGLang server or router.

    python -m benchmark.accuracy.longbench --longbench DIR --base-url URL --label NAME --output FILE.jsonl
    python -m benchmark.accuracy.longbench compare STOCK.jsonl [OTHER.jsonl ...]

The first asks the paper's eight sets and writes every answer as it comes; the same command again goes on where it
stopped, and asks what failed once more. It exits with 1 where answers are missing. ``compare`` prints the scores of
files, that of the stock server first. longbench_data.py says how LongBench's repository and data lie; scoring runs
LongBench's own metrics.py.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmark.accuracy import longbench_data as data
from benchmark.accuracy.longbench_data import LongBench, Question
from benchmark.accuracy.longbench_table import KEY, SETTINGS, Answers, table
from benchmark.accuracy.row_file import RowFile
from benchmark.progress import Progress
from benchmark.rows import Row, environment
from servers.sglang_http import RequestFailed, generate, http_json
from sglang_scout.core.errors import ConfigError, ScoutError

TIMEOUT_S = 3600.0
# No answer, or none of the shape that SGLang's have.
FAILURES = (RequestFailed, OSError, http.client.HTTPException, LookupError, TypeError, ValueError)


class Prompts:
    """Questions as token ids, as LongBench makes them: cut in the middle, then the chat template.

    Ids, not text for the chat endpoint: LongBench cuts by tokens and continues few-shot prompts without
    a template, and two servers get the same whatever they would make of a text.
    """

    def __init__(self, name: str, chat: str, max_tokens: int) -> None:
        # Here, not above: a second of imports that comparing files does without.
        from transformers import AutoTokenizer

        self._lock = threading.Lock()  # a tokenizer must not be used by two threads at once
        self._chat, self._max_tokens = chat == "auto", max_tokens
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
            if self._chat:
                self._chat_ids("")  # raises without a template
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--tokenizer {name}: {error}; name the folder of the served model's tokenizer, and "
                "give --chat off for a base model"
            ) from None
        self.newline_ids = self._tokenizer.encode("\n", add_special_tokens=False)[-1:]

    def encode(self, question: Question) -> tuple[list[int], int]:
        """Token ids, and how many were left out in the middle."""
        with self._lock:
            text, cut = question.prompt, 0
            ids = self._ids(text)
            if len(ids) > self._max_tokens:
                half = self._max_tokens // 2
                cut = len(ids) - 2 * half
                parts = (ids[:half], ids[half + cut :])
                text = "".join(self._tokenizer.decode(x, skip_special_tokens=True) for x in parts)
                ids = self._ids(text)
            if self._chat and question.set_name not in data.WITHOUT_CHAT:
                ids = self._chat_ids(text)
            return ids, cut

    def _ids(self, text: str, **options: bool) -> list[int]:
        return list(self._tokenizer(text, verbose=False, **options).input_ids)

    def _chat_ids(self, text: str) -> list[int]:
        # Answers are at most 512 tokens long: no room to think aloud first. Templates that know
        # nothing of thinking ignore the word.
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        messages = [{"role": "user", "content": text}]
        written = self._tokenizer.apply_chat_template(messages, **options)
        return self._ids(written, add_special_tokens=False)


def ask_server(url: str) -> tuple[str, str]:
    """The paths of its model and its tokenizer."""
    try:
        info = http_json(f"{url}/get_model_info", timeout_s=30)
        return info["model_path"], info.get("tokenizer_path") or info["model_path"]
    except FAILURES as error:
        raise ConfigError(
            f"--base-url {url}: {error!r}; start an SGLang server or router first, and name it as "
            "http://HOST:PORT"
        ) from None


def ask(url: str, prompts: Prompts, question: Question) -> Row:
    """One question to the fields of its row. Greedy, to the end of text."""
    ids, cut = prompts.encode(question)
    row: Row = {"prompt_tokens": len(ids), "cut_tokens": cut, "prompt_sha": data.sha(ids)}
    options: dict[str, Any] = {"ignore_eos": False}
    if question.set_name in data.STOP_AT_NEWLINE:
        options |= {"stop_token_ids": prompts.newline_ids, "min_new_tokens": 1}
    length = question.max_new_tokens
    try:
        [answer] = generate(
            url, [ids], max_new_tokens=length, sampling=options, timeout_s=TIMEOUT_S
        )
        # A server told to truncate by itself would answer another question.
        if answer.prompt_tokens != len(ids):
            raise RequestFailed(
                f"the server read {answer.prompt_tokens} of {len(ids)} prompt tokens; start it "
                "without --allow-auto-truncate, or give --max-prompt-tokens"
            )
    except FAILURES as error:
        return row | {"status": "failed", "reason": repr(error)[:1000]}
    found = {"text": answer.text, "finish_reason": answer.finish_reason}
    return row | found | {"status": "ok", "reason": "", "latency_s": answer.latency_s}


def ask_all(
    args: argparse.Namespace, prompts: Prompts, questions: Sequence[Question], file: RowFile
) -> str:
    """Write each answer when it comes. Returns why some are missing, "" if none is."""
    progress, failed, reason = Progress(), 0, ""
    progress.say(f"{len(questions)} questions to ask, {args.concurrency} at a time")
    pool = ThreadPoolExecutor(args.concurrency)
    asked = {pool.submit(ask, args.base_url, prompts, q): q for q in questions}
    try:
        for done, future in enumerate(as_completed(asked), 1):
            row = dict(zip(KEY, asked[future].key, strict=True)) | future.result()
            file.add(args.label, **row)
            failed, reason = failed + (row["status"] == "failed"), row["reason"] or reason
            progress.update(f"{row['set']}: {done} of {len(questions)} asked, {failed} failed")
        return f"{failed} failed, the last with {reason}" if failed else ""
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def command_run(args: argparse.Namespace) -> int:
    args.base_url = args.base_url.rstrip("/")
    copy, sets = LongBench(args.longbench), dict.fromkeys(args.sets)
    questions = [q for name in sets for q in copy.questions(name)[: args.limit]]
    model, tokenizer = ask_server(args.base_url)
    prompts = Prompts(args.tokenizer or tokenizer, args.chat, args.max_prompt_tokens)
    values = (args.label, model, args.chat, args.max_prompt_tokens)
    settings = dict(zip(SETTINGS, values, strict=True))
    about = environment("longbench", ["transformers"])
    about |= {"longbench": str(args.longbench.resolve()), "untimed": True}
    try:
        file = RowFile(args.output, about, settings, KEY)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output {args.output}: {error}; name another file") from None
    if args.output.stat().st_size:
        Answers(args.output, settings)
    left = [q for q in questions if not file.has(**dict(zip(KEY, q.key, strict=True)))]
    missing = ask_all(args, prompts, left, file)
    if missing:
        print(f"longbench.py: answers are missing: {missing}", file=sys.stderr)
        print("The same command again asks only those.", file=sys.stderr)
        return 1
    print(table([args.output], args.longbench), end="")
    return 0


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    if arguments and arguments[0] == "compare":
        add("command")
        add("files", nargs="+", type=Path, metavar="FILE")
        add("--longbench", type=Path, metavar="DIR", help="default: that of the first file's run")
        return parser.parse_args(arguments)
    add("--longbench", type=Path, required=True, metavar="DIR", help="copy of its repository")
    add("--base-url", required=True, metavar="URL", help="SGLang server or router")
    add("--label", required=True, help="name of what is served, for tables")
    add("--output", type=Path, required=True, metavar="FILE", help="answers, JSON lines")
    add("--sets", nargs="+", default=data.PAPER_SETS, metavar="SET", help="default: the paper's")
    add("--limit", type=int, metavar="N", help="only the first N questions of each set")
    add("--concurrency", type=int, default=16, metavar="N", help="requests at a time")
    add("--tokenizer", metavar="DIR", help="default: the one that the server names")
    add("--chat", choices=["auto", "off"], default="auto", help="off: no template, for base models")
    text = "longer prompts lose their middle; default: LongBench's own for a context of 32k"
    add("--max-prompt-tokens", type=int, default=31500, metavar="N", help=text)
    return parser.parse_args(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        if "files" not in args:
            return command_run(args)
        print(table(args.files, args.longbench), end="")
        return 0
    except ScoutError as error:
        print(f"longbench.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
