#!/usr/bin/env python3
"""The main job on one machine: prefill and decode server, router, bench_serving and questions.

Run it as scripts/demo.sh, which does the set-up first. The model is a small one that finds facts in
long texts (benchmark/accuracy/recall_model); yours, if you name one. Exit status 0 means: every
request was answered in full, the small model found its facts, the CPU worker computed pages, pages
were recalled, and no process is left.
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
from sglang_scout.cli import device
from sglang_scout.cli.pd_cluster import PDCluster, flags
from sglang_scout.cli.server_process import ServerFailed
from sglang_scout.cli.sglang_http import RequestFailed, sse_events
from sglang_scout.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "benchmark" / "accuracy" / "recall_model"
sys.path.insert(0, str(MODEL.parent))

import tasks  # noqa: E402

# Its keys have no channels that stand out, and layer 1 asks for what layer 0 has just gathered.
MODEL_CONFIG = {"digest": "signs", "exact_layers": [1], "resident_bonus": 1.0}
QUESTION_TASKS = ("needle", "multi_key", "variables")
SEED = 4242
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
    add("--model", type=Path, help="folder of your own model (default: a small one, see its card)")
    add("--device", default="auto", choices=device.CHOICES, help="auto: a GPU if it can be used")
    add("--kv-offload", default="scout", metavar="POLICY", help="of both servers")
    add("--budget", type=int, default=512, metavar="TOKENS", help="--kv-offload-budget")
    add("--prompts", type=int, default=16, help="requests of bench_serving")
    add("--concurrency", type=int, default=16, help="requests at once")
    add("--input-len", type=int, default=4096, metavar="TOKENS", help="of every prompt")
    add("--output-len", type=int, default=64, metavar="TOKENS", help="of every answer")
    add("--keep-logs", action="store_true", help="keep the logs also when all went well")
    return parser.parse_args(argv)


def make_cluster(
    args: argparse.Namespace, where: device.Placement, model: Path, log_dir: Path
) -> PDCluster:
    """The servers, sized for the demo's requests with some room."""
    requests = max(args.concurrency, 8)
    tokens_per_request = args.input_len + args.output_len + 256
    # Room for twice as many. The device cache is sized for that, and what fits stays: the requests
    # of the demo have two budgets each.
    room = 2 * requests
    # SGLang's own choice of this share goes below zero on a CPU with the prefill size set below.
    prefill, decode = where.memory(cpu_share=0.5)
    common = []
    if args.kv_offload != "none":
        common = flags(kv_offload=args.kv_offload, kv_offload_budget=args.budget)
        shared = MODEL_CONFIG if args.model is None else {}
        # On a GPU it would otherwise be what the memory leaves, and nothing be left to the CPU.
        cache = {"resident_tokens": room * args.budget} if where.decode == device.CUDA else {}
        for options, config in ((prefill, shared | where.prefill_config), (decode, shared | cache)):
            if config:
                options["kv_offload_config"] = json.dumps(config)
    if where.prefill == device.CPU:
        # All waiting prompts in one prefill batch: the decode server then gets them at about the
        # same time and really runs them together. A GPU needs no help for that.
        prefill |= {"max_prefill_tokens": requests * tokens_per_request}
        prefill |= {"chunked_prefill_size": -1}
    return PDCluster(
        model,
        device=where.decode,
        prefill_device=where.prefill,
        one_by_one=where.one_gpu_for_both,
        dtype="bfloat16",
        log_dir=log_dir,
        max_running_requests=room,
        max_total_tokens=(requests + 2) * tokens_per_request,
        server_args=common,
        prefill_args=flags(**prefill),
        decode_args=flags(**decode, decode_log_interval=5),
        ready_timeout_s=where.ready_timeout_s,
    )


def task_prompts(path: Path, count: int, length_tokens: int) -> Path:
    """Writes ``count`` prompts that the small model knows how to read, as bench_serving wants them."""
    with path.open("w") as file:
        for index in range(count):
            task = tasks.TASKS[index % len(tasks.TASKS)]
            sample = tasks.make_sample(task, length_tokens, SEED + index)
            turns = [{"content": sample.prompt_text}, {"content": sample.answer_text}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    return path


def bench_prompts(cluster: PDCluster, args: argparse.Namespace) -> list[str]:
    """Flags of bench_serving that name its prompts."""
    if args.model is not None:
        return flags(
            dataset_name="random-ids",
            tokenize_prompt=True,  # token ids: exact prompt lengths
            random_range_ratio=1,
            random_input_len=args.input_len,
            random_output_len=args.output_len,
        )
    path = task_prompts(cluster.log_dir / "prompts.jsonl", args.prompts, args.input_len)
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
        disable_tqdm=True,
        output_file=result_file,
    ) + bench_prompts(cluster, args)
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


def chat(cluster: PDCluster, model: Path, content: str, max_tokens: int) -> tuple[str, str]:
    """One streamed chat completion: the answer, and a line on its tokens and times."""
    payload = {
        "model": str(model),
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
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
    return answer, (
        f"{usage['prompt_tokens']} tokens in, {usage['completion_tokens']} out; "
        f"the first after {first_s:.1f} s, the last after {total_s:.1f} s"
    )


def ask_facts(cluster: PDCluster, model: Path, tokens: int) -> None:
    """Asks the small model for facts in long texts. Raises DemoFailed unless it finds them all."""
    for index, task in enumerate(QUESTION_TASKS):
        sample = tasks.make_sample(task, tokens, SEED - 1 - index)
        answer, times = chat(cluster, model, sample.prompt_text, len(sample.answer))
        asked = tasks.to_text(sample.prompt[-4:])
        print(f"\n  {task}: ... {asked}\n  answer:   {answer.strip()}\n  {times}")
        if not tasks.is_correct(task, sample.answer, tasks.to_ids(answer.strip())):
            raise DemoFailed(f"the right answer to {asked!r} is {sample.answer_text!r}")


def ask_about_text(cluster: PDCluster, model: Path, tokens: int) -> None:
    """One question to a model of which nothing is known, over ``tokens`` tokens of real text."""
    content = f"{QUESTION}\n\n{text_of_tokens(model, tokens)}"
    answer, times = chat(cluster, model, content, CHAT_TOKENS)
    print(f"\n  question: {QUESTION} (+ text)\n  answer:   {answer!r}\n  {times}")


def offload_state(cluster: PDCluster, args: argparse.Namespace) -> dict[str, Any]:
    return {} if args.kv_offload == "none" else cluster.kv_offload("decode")


def check_offload(state: dict[str, Any]) -> None:
    """Raises DemoFailed unless recall, and the CPU where it is meant to, had a part in the answers."""
    copies_ahead = state["policy"] == "infinigen"
    for name in ("recalled_pages",) if copies_ahead else ("cpu_pages", "recalled_pages"):
        if not state[name] > 0:
            raise DemoFailed(f"kv_offload.{name} is {state[name]}, expected more than 0: {state}")
    if state["worker"]["state"] != "ready":
        raise DemoFailed(f"the CPU worker is not ready: {state['worker']}")


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
    say("streamed chat completions over long texts")
    ask = ask_facts if args.model is None else ask_about_text
    ask(cluster, model, max(args.input_len, 4096))
    state = offload_state(cluster, args)
    if state:
        names = ("steps", "selected_pages", "cpu_pages", "recalled_pages", "fallback_pages")
        print("  its counters: " + ", ".join(f"{n} {state[n] - before[n]}" for n in names))
    print_report(bench, state, cluster.servers["decode"].log())
    if state:
        check_offload(state)
    for server in cluster.all_servers():
        server.check()


def run(args: argparse.Namespace, where: device.Placement, log_dir: Path) -> None:
    """The demo; raises DemoFailed or ServerFailed. No process is left, whatever happens."""
    model = args.model or MODEL
    if not (model / "config.json").is_file():
        raise DemoFailed(f"--model {model}: no config.json there; give the folder of a model")
    model = model.resolve()
    say(f"starting the servers: {model.name}, --kv-offload {args.kv_offload}, {where}")
    cluster = make_cluster(args, where, model, log_dir)
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
    try:
        where = device.place(args.device)
    except ConfigError as error:
        print(f"scripts/demo.sh: {error}", file=sys.stderr)
        return 2
    # Clean up as after Ctrl-C. Raised here, not sent on: a background job of a shell ignores SIGINT.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    log_dir = Path(tempfile.mkdtemp(prefix="sglang-scout-demo-"))
    try:
        run(args, where, log_dir)
    except (DemoFailed, ServerFailed) as error:
        print(f"\n{error}\n\ndemo: FAILED; logs are in {log_dir}", file=sys.stderr)
        if where.decode != device.CPU:
            print("without the GPU: scripts/demo.sh --device cpu", file=sys.stderr)
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
