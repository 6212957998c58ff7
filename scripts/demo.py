#!/usr/bin/env python3
"""The main job on one machine: prefill and decode server, router, bench_serving and one chat.

Run it as scripts/demo.sh, which does the set-up first. Exit status 0 means: every request was
answered in full, the CPU worker computed pages, pages were recalled, and no process is left.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from long_text import text_of_tokens
from make_tiny_model import TinyModelSpec, cached_tiny_model
from pd_cluster import PDCluster, flags
from server_process import ServerFailed
from sglang_http import RequestFailed, sse_events

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "Read the text below and say in a few words what it is about."
CHAT_TOKENS = 48
BEGIN = time.monotonic()


class DemoFailed(RuntimeError):
    """Something that the demo promises did not happen."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGIN:6.1f} s] {text}", flush=True)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo.sh",
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, help="folder of your own model in place of a tiny random Qwen3")
    add("--kv-offload", default="scout", metavar="POLICY", help="of both servers")
    add("--budget", type=int, default=512, metavar="TOKENS", help="--kv-offload-budget")
    add("--prompts", type=int, default=16, help="requests of bench_serving")
    add("--concurrency", type=int, default=16, help="requests at once")
    add("--input-len", type=int, default=4096, metavar="TOKENS", help="of every prompt")
    add("--output-len", type=int, default=64, metavar="TOKENS", help="of every answer")
    add("--keep-logs", action="store_true", help="keep the logs also when all went well")
    return parser.parse_args(argv)


def make_cluster(args: argparse.Namespace, model: Path, log_dir: Path) -> PDCluster:
    """The servers, sized for the demo's requests with some room."""
    requests = max(args.concurrency, 8)
    tokens_per_request = args.input_len + args.output_len + 256
    # SGLang's own choice of this share goes below zero on a CPU with the prefill size set below.
    common = flags(mem_fraction_static=0.5)
    if args.kv_offload != "none":
        common += flags(kv_offload=args.kv_offload, kv_offload_budget=args.budget)
    return PDCluster(
        model,
        device="cpu",  # the one device that this version's decode server runs on
        dtype="bfloat16",
        log_dir=log_dir,
        max_running_requests=requests,
        max_total_tokens=(requests + 2) * tokens_per_request,
        server_args=common,
        # All waiting prompts in one prefill batch: the decode server then gets them at about the
        # same time and really runs them together.
        prefill_args=flags(
            max_prefill_tokens=requests * tokens_per_request, chunked_prefill_size=-1
        ),
        decode_args=flags(decode_log_interval=5),
    )


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
        dataset_name="random-ids",
        tokenize_prompt=True,  # token ids: exact prompt lengths
        random_range_ratio=1,
        random_input_len=args.input_len,
        random_output_len=args.output_len,
        num_prompts=args.prompts,
        max_concurrency=args.concurrency,
        disable_tqdm=True,
        output_file=result_file,
    )
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


def run_chat(cluster: PDCluster, model: Path, tokens: int) -> dict[str, Any]:
    """One streamed chat completion over ``tokens`` tokens of real text; prints and returns it."""
    payload = {
        "model": str(model),
        "messages": [{"role": "user", "content": f"{QUESTION}\n\n{text_of_tokens(model, tokens)}"}],
        "max_tokens": CHAT_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.monotonic()
    answer, finish, usage, first_s = "", None, {}, 0.0
    for event in sse_events(cluster.url + "/v1/chat/completions", payload):
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            first_s = first_s or time.monotonic() - begin
            answer += choice["delta"].get("content") or ""
            finish = choice.get("finish_reason") or finish
    total_s = time.monotonic() - begin
    if finish not in ("stop", "length") or not answer:
        raise DemoFailed(f"the chat gave no answer (finish_reason {finish!r}, answer {answer!r})")
    if usage.get("prompt_tokens", 0) < tokens:
        raise DemoFailed(f"the chat counted {usage} for a prompt of {tokens} tokens or more")
    print(f"\n  question: {QUESTION} (+ text)\n  answer:   {answer!r}")
    print(
        f"  {usage['prompt_tokens']} tokens in, {usage['completion_tokens']} out; "
        f"the first after {first_s:.1f} s, the last after {total_s:.1f} s"
    )
    return usage


def offload_state(cluster: PDCluster, args: argparse.Namespace) -> dict[str, Any]:
    return {} if args.kv_offload == "none" else cluster.kv_offload("decode")


def check_offload(state: dict[str, Any]) -> None:
    """Raises DemoFailed unless the CPU and the recall really had a part in the answers."""
    for name in ("cpu_pages", "recalled_pages"):
        if not state[name] > 0:
            raise DemoFailed(f"kv_offload.{name} is {state[name]}, expected more than 0: {state}")
    if state["worker"]["state"] != "ready":
        raise DemoFailed(f"the CPU worker is not ready: {state['worker']}")


def print_report(bench: dict[str, Any], state: dict[str, Any], decode_log: str) -> None:
    batches = map(int, re.findall(r"Decode batch.*?#running-req: (\d+)", decode_log))
    rows = {
        "requests answered": f"{bench['completed']} of bench_serving, 1 chat",
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
            "cpu compute ratio": f"{state['cpu_compute_ratio']:.3f}",
            "pages computed on CPU": f"{state['cpu_pages']} of {state['selected_pages']} selected",
            "pages recalled": f"{state['recalled_pages']} "
            f"({state['recall_bytes'] / 2**20:.1f} MiB)",
            "fallback pages": state["fallback_pages"],
            "worker": f"{worker['state']}, pid {worker['pid']}, {worker['restarts']} restarts",
        }
    print()
    for name, value in rows.items():
        print(f"  {name:<22} {value}")
    print(flush=True)


def use_cluster(cluster: PDCluster, model: Path, args: argparse.Namespace) -> None:
    """Everything between the start of the servers and their stop."""
    say(
        f"bench_serving: {args.prompts} prompts of {args.input_len} tokens, "
        f"{args.concurrency} at once"
    )
    bench = run_bench(cluster, model, args)
    before = offload_state(cluster, args)
    say("one streamed chat completion over a long text")
    run_chat(cluster, model, max(args.input_len, 4096))
    state = offload_state(cluster, args)
    if state:
        names = ("steps", "selected_pages", "cpu_pages", "recalled_pages", "fallback_pages")
        print("  its counters: " + ", ".join(f"{n} {state[n] - before[n]}" for n in names))
    print_report(bench, state, cluster.servers["decode"].log())
    if state:
        check_offload(state)
    for server in cluster.all_servers():
        server.check()


def run(args: argparse.Namespace, log_dir: Path) -> None:
    """The demo; raises DemoFailed or ServerFailed. No process is left, whatever happens."""
    model = args.model
    if model is None:
        spec = TinyModelSpec(arch="qwen3", dtype="bfloat16")
        model = cached_tiny_model(spec, ROOT / ".cache" / "models")
    elif not (model / "config.json").is_file():
        raise DemoFailed(f"--model {model}: no config.json there; give the folder of a model")
    model = model.resolve()
    say(f"starting the servers: {model.name}, --kv-offload {args.kv_offload}")
    cluster = make_cluster(args, model, log_dir)
    try:
        with cluster:
            say(f"ready after {cluster.startup_s:.0f} s, {len(cluster.processes())} processes")
            use_cluster(cluster, model, args)
            say("stopping the servers")
            outlived = cluster.stop(grace_s=40.0)
            if outlived:
                raise DemoFailed(f"processes had to be killed one by one: {outlived}")
    except (DemoFailed, RequestFailed, OSError, ValueError, KeyError) as error:
        raise DemoFailed(f"{type(error).__name__}: {error}\n{cluster.tails(15)}") from error
    if cluster.processes():
        raise DemoFailed(f"still running: {cluster.processes()}")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    # Clean up as after Ctrl-C. Raised here, not sent on: a background job of a shell ignores SIGINT.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    log_dir = Path(tempfile.mkdtemp(prefix="sglang-scout-demo-"))
    try:
        run(args, log_dir)
    except (DemoFailed, ServerFailed) as error:
        print(f"\n{error}\n\ndemo: FAILED; logs are in {log_dir}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ndemo: interrupted, all stopped; logs are in {log_dir}", file=sys.stderr)
        return 130
    if args.keep_logs:
        say(f"logs are in {log_dir}")
    else:
        shutil.rmtree(log_dir)
    say("done: every request answered, nothing left running")
    return 0


if __name__ == "__main__":
    sys.exit(main())
