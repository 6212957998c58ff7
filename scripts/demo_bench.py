"""SGLang's own bench_serving on the demo's servers, and the final report."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from demo_questions import DemoFailed
from servers.group import flags
from servers.pd_cluster import PDCluster


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
        dataset_name="random-ids",
        tokenize_prompt=True,  # token ids: exact prompt lengths
        random_range_ratio=1,
        random_input_len=args.input_len,
        random_output_len=args.output_len,
    )
    with open(log, "wb") as sink:
        code = subprocess.run(
            command,
            env=cluster.client_environment,
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
