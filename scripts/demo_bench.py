"""SGLang's own bench_serving on the demo's servers, and the final report."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmark.accuracy import tasks
from demo_jobs import OWN, RECALL, SEED, TEXT_TOKENS, DemoFailed, text_of_tokens
from servers.pd_cluster import PDCluster, flags


def bench_texts(args: argparse.Namespace, model: Path) -> Iterator[tuple[str, str]]:
    """Prompts and answers for bench_serving, from the recall model's tasks, or from the text."""
    for index in range(args.prompts):
        if args.job is RECALL:
            task = tasks.TASKS[index % len(tasks.TASKS)]
            sample = tasks.make_sample(task, args.input_len, SEED + index)
            yield sample.prompt_text, sample.answer_text
        else:
            begin = TEXT_TOKENS + index * args.input_len
            yield text_of_tokens(model, args.input_len, begin), "."


def bench_prompts(cluster: PDCluster, model: Path, args: argparse.Namespace) -> list[str]:
    """Flags of bench_serving that select its prompts."""
    if args.job is OWN:
        return flags(
            dataset_name="random-ids",
            tokenize_prompt=True,  # token ids: exact prompt lengths
            random_range_ratio=1,
            random_input_len=args.input_len,
            random_output_len=args.output_len,
        )
    path = cluster.log_dir / "prompts.jsonl"
    with path.open("w") as file:
        for turns in bench_texts(args, model):
            file.write(json.dumps({"conversations": [{"content": x} for x in turns]}) + "\n")
    return flags(dataset_name="custom", dataset_path=path, sharegpt_output_len=args.output_len)


def run_bench(cluster: PDCluster, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """SGLang's own bench_serving through the router; returns its result row.

    Raises DemoFailed unless every request was answered with all its tokens.
    """
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
    ) + bench_prompts(cluster, model, args)
    with open(log, "wb") as sink:
        code = subprocess.run(
            command,
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        ).returncode
    if code != 0 or not result_file.is_file():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise DemoFailed(f"bench_serving ended with exit code {code}:\n{tail}")
    row = json.loads(result_file.read_text().splitlines()[-1])
    tokens = args.prompts * args.output_len
    if row["completed"] != args.prompts or row["total_output_tokens"] != tokens:
        raise DemoFailed(
            f"bench_serving: {row['completed']} of {args.prompts} requests answered, "
            f"{row['total_output_tokens']} of {tokens} tokens (see {log})"
        )
    return row


def print_report(bench: dict[str, Any], state: dict[str, Any], decode_log: str) -> None:
    batches = map(int, re.findall(r"Decode batch.*?#running-req: (\d+)", decode_log))
    rows = {
        "requests answered": f"{bench['completed']} of bench_serving, and the questions above",
        "throughput": f"{bench['output_throughput']:.1f} output tokens/s "
        f"({bench['input_throughput']:.0f} input)",
        "TPOT": f"{bench['mean_tpot_ms']:.1f} ms mean, {bench['median_tpot_ms']:.1f} ms median",
        "TTFT": f"{bench['mean_ttft_ms'] / 1e3:.1f} s mean",
        "largest decode batch": max(batches, default=0),
        "policy": "none (stock SGLang)",
    }
    if state:
        worker = state["worker"]
        rows |= {
            "policy": f"{state['policy']} ({state['backend']}), "
            f"budget {state['budget_tokens']} tokens, pages of {state['page_size']}",
            "CPU compute ratio": f"{state['cpu_compute_ratio']:.3f}",
            "pages computed on CPU": f"{state['cpu_pages']} of {state['selected_pages']} selected",
            "pages recalled": f"{state['recalled_pages']} "
            f"({state['recall_bytes'] / 2**20:.1f} MiB)",
            "fallback pages": state["fallback_pages"],
            "CPU attention process": f"{worker['state']}, pid {worker['pid']}, {worker['restarts']} restarts",
        }
    print()
    for name, value in rows.items():
        print(f"  {name:<22} {value}")
    print(flush=True)
