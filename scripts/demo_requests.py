"""What the demo asks its servers: questions about a real text, and SGLang's own bench_serving."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from servers.group import flags
from servers.pd_cluster import PDCluster
from servers.sglang_http import sse_events
from texts import load_text

TEXT_TOKENS = 5800
CHAT_TOKENS = 32
NUMBER = "7413"
FACT = f"The secret number of the lighthouse is {NUMBER}."
FACT_QUESTION = "What is the secret number of the lighthouse?"
QUESTIONS = (
    FACT_QUESTION,
    "What is this text about? Answer in one sentence.",
    "Who built the ark, and why?",
)


class DemoFailed(RuntimeError):
    """The demo did not meet one of its guarantees."""


def text_of_tokens(model: Path, tokens: int) -> str:
    """The first ``tokens`` tokens of a text. Without tokenizer.json a token counts as 4 characters."""
    text = load_text("prose")
    if not (model / "tokenizer.json").is_file():
        return text[: 4 * tokens]
    # No token is shorter than a byte: an upper bound of the characters needed.
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    offsets = tokenizer.encode(text[: 8 * tokens], add_special_tokens=False).offsets
    return text[: offsets[tokens - 1][1]]


def chat_payload(model: Path, content: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return dict(model=str(model), messages=messages, max_tokens=CHAT_TOKENS, temperature=0)


def chat(cluster: PDCluster, model: Path, content: str) -> str:
    """One streamed chat completion, then a line on its tokens and times."""
    payload = chat_payload(model, content)
    payload |= {"stream": True, "stream_options": {"include_usage": True}}
    begin = time.monotonic()
    answer, finish, usage, first_s = "", None, {}, 0.0
    print("  answer:   ", end="", flush=True)
    for event in sse_events(cluster.url + "/v1/chat/completions", payload):
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            first_s = first_s or time.monotonic() - begin
            more = choice["delta"].get("content") or ""
            print(more.replace("\n", "\n            "), end="", flush=True)
            answer += more
            finish = choice.get("finish_reason") or finish
    total_s = time.monotonic() - begin
    print()
    if finish not in ("stop", "length") or not answer:
        raise DemoFailed(f"the chat gave no answer (finish_reason {finish!r}, answer {answer!r})")
    print(
        f"            ({usage['prompt_tokens']} tokens in, {usage['completion_tokens']} out; "
        f"the first after {first_s:.1f} s, the last after {total_s:.1f} s)"
    )
    return answer


def converse(cluster: PDCluster, model: Path) -> None:
    """Asks about a text with a fact in its middle. Raises DemoFailed unless the fact is found."""
    text = text_of_tokens(model, TEXT_TOKENS)
    middle = text.index(". ", len(text) // 2) + 2
    text = f"{text[:middle]}{FACT} {text[middle:]}"
    print(f"  the text: {text[:72]}...\n  in its middle: {FACT}")
    for question in QUESTIONS:
        print(f"\n  question: {question}")
        content = f"{text}\n\n{question}"
        answer = chat(cluster, model, content)
        if "full" in cluster.servers:
            # After the other one, so that it hits the text in the prefill server's radix cache.
            full = cluster.ask_pair(chat_payload(model, content), "full", "/v1/chat/completions")
            print(f"  full:     {full['choices'][0]['message']['content']}")
        if question == FACT_QUESTION and NUMBER not in answer:
            raise DemoFailed(f"wrong answer: the secret number in the text is {NUMBER}")


def run_bench(cluster: PDCluster, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The result row of SGLang's own bench_serving. Raises DemoFailed unless every request was answered in full."""
    result_file = cluster.log_dir / "bench_serving.jsonl"
    log = cluster.log_dir / "bench_serving.log"
    command = [sys.executable, "-m", "sglang.bench_serving"]
    command += flags(
        backend="sglang",
        base_url=cluster.url,
        model=model,
        num_prompts=args.prompts,
        max_concurrency=args.concurrency,
        warmup_requests=0,  # the questions were the warm-up
        disable_tqdm=True,
        output_file=result_file,
        dataset_name="random-ids",
        tokenize_prompt=True,  # token ids: exact prompt lengths
        random_range_ratio=1,
        random_input_len=args.input_len,
        random_output_len=args.output_len,
    )
    pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with open(log, "wb") as sink:
        done = subprocess.run(command, env=cluster.environment(), stdout=sink, **pipes)
    if done.returncode != 0 or not result_file.is_file():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise DemoFailed(f"bench_serving ended with exit code {done.returncode}:\n{tail}")
    row = json.loads(result_file.read_text().splitlines()[-1])
    tokens = args.prompts * args.output_len
    if row["completed"] != args.prompts or row["total_output_tokens"] != tokens:
        raise DemoFailed(
            f"bench_serving: {row['completed']} of {args.prompts} requests answered, "
            f"{row['total_output_tokens']} of {tokens} tokens (see {log})"
        )
    return row
