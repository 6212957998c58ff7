#!/usr/bin/env python3
"""End-to-end demo on one machine: prefill and decode server, router, questions and bench_serving.

Run it as scripts/demo.sh, which does the set-up first. A small language model answers three questions about a real
text, one of them about a fact hidden in it, each followed by the answer of full attention. Exit status 0: every request
was answered in full, the fact was found, the CPU attention process computed pages, pages were recalled, and no process
is left.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from packages import Unavailable
from sglang_scout.core.errors import ConfigError
from smollm2 import smollm2

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test"))  # for the server launchers

from demo_requests import (  # noqa: E402
    TEXT_TOKENS,
    DemoFailed,
    chat,
    converse,
    run_bench,
    text_of_tokens,
)
from servers import placement  # noqa: E402
from servers.group import flags  # noqa: E402
from servers.pd_cluster import PDCluster  # noqa: E402
from servers.server_process import ServerFailed  # noqa: E402
from servers.sglang_http import RequestFailed  # noqa: E402

BEGIN = time.monotonic()

# What a model is asked unless flags say otherwise. Without AMX, CPUs are several times slower in bfloat16.
SMOLLM2 = {"prompts": 4, "input_len": 512, "output_len": 16, "cpu_dtype": "float32"}
OWN = {"prompts": 16, "input_len": 4096, "output_len": 64, "cpu_dtype": "bfloat16"}


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGIN:6.1f} s] {text}", flush=True)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo.sh", description=(__doc__ or "").split("\n\n")[0]
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="the folder of your own model (default: SmolLM2-135M)")
    device = "auto, the default, takes a GPU if it can be used"
    add("--device", default="auto", choices=placement.CHOICES, help=device)
    add("--kv-offload", default="scout", metavar="POLICY", help="policy of both servers")
    number = {"type": int, "metavar": "N"}
    add("--budget", default=512, help="value of --kv-offload-budget (default: 512)", **number)
    add("--concurrency", help="requests at the same time (default: all)", **number)
    about = {
        "prompts": "requests that bench_serving sends",
        "input_len": "input tokens per request",
        "output_len": "output tokens per request",
    }
    for name, text in about.items():
        text += f" (default: {OWN[name]}, for SmolLM2 {SMOLLM2[name]})"
        add("--" + name.replace("_", "-"), help=text, **number)
    add("--keep-logs", action="store_true", help="keep the logs also if the demo succeeds")
    parser.set_defaults(**OWN)
    if parser.parse_args(argv).model == "smollm2":
        parser.set_defaults(**SMOLLM2)
    args = parser.parse_args(argv)
    args.concurrency = args.concurrency or args.prompts
    return args


def find_model(name: str) -> Path:
    """The folder of ``--model``. Raises DemoFailed or Unavailable."""
    model = smollm2() if name == "smollm2" else Path(name)
    if not (model / "config.json").is_file():
        raise DemoFailed(f"--model {name}: no config.json there; give the folder of a model")
    return model.resolve()


def make_cluster(
    args: argparse.Namespace, where: placement.Placement, model: Path, log_dir: Path
) -> PDCluster:
    """The servers, sized for the demo's requests with some room."""
    requests = max(args.concurrency, 8)
    tokens_per_request = args.input_len + args.output_len + 256
    # Room for twice as many: the requests of the demo have two budgets each, and what fits stays resident.
    room = 2 * requests
    prefill, decode = where.memory()
    common, servers = [], {}
    if args.kv_offload != "none":
        common = flags(kv_offload=args.kv_offload, kv_offload_budget=args.budget)
        cache = {}
        if args.model == "smollm2":
            # One text at a time: soon everything it needs would be resident.
            cache = {"resident_tokens": 2 * args.budget}
            # For comparison: its budget covers the text, so all its pages stay on the device.
            whole = (TEXT_TOKENS + 512) // 32 * 32
            full = {"kv_offload_budget": whole, "max_running_requests": 1}
            servers["full"] = flags(**decode, **full)
        elif where.decode == placement.CUDA:
            # The default is all free memory, which would leave no pages to the CPU.
            cache = {"resident_tokens": room * args.budget}
        # Digests are on the decode server's device, which such a transfer cannot write.
        sends = {} if where.prefill == where.decode else {"prefill_digests": False}
        for options, config in ((prefill, sends), (decode, cache)):
            if config:
                options["kv_offload_config"] = json.dumps(config)
    max_total_tokens = max((requests + 2) * tokens_per_request, 3 * TEXT_TOKENS)
    if where.prefill == placement.CPU:
        # All waiting prompts in one prefill batch, so that the decode server gets and runs them as a batch.
        prefill |= {"max_prefill_tokens": max_total_tokens, "chunked_prefill_size": -1}
    on_cpu = placement.CPU in (where.prefill, where.decode)
    sizes = flags(
        dtype=args.cpu_dtype if on_cpu else "bfloat16",
        max_running_requests=room,
        max_total_tokens=max_total_tokens,
    )
    servers["prefill"] = flags(**prefill)
    servers["decode"] = flags(**decode, decode_log_interval=5)
    cluster = PDCluster(
        model,
        servers,
        server_args=sizes + common,
        # While the CPU prefills long prompts, a server's health checks time out.
        router_args=flags(health_failure_threshold=100),
        one_by_one=where.one_gpu_for_both or "full" in servers and where.decode == placement.CUDA,
        log_dir=log_dir,
        # On a GPU kernels may have to be compiled first.
        ready_timeout_s=600.0 if where.decode == placement.CPU else 1200.0,
    )
    cluster.on_ready = lambda name: say(f"the {name} server is ready")
    return cluster


def offload_state(cluster: PDCluster, args: argparse.Namespace) -> dict[str, Any]:
    return {} if args.kv_offload == "none" else cluster.kv_offload("decode")


def check_offload(state: dict[str, Any]) -> None:
    """Raises DemoFailed unless recall, and the CPU where expected, contributed to the answers."""
    copies_ahead = state["policy"] == "infinigen"
    for name in ("recalled_pages",) if copies_ahead else ("cpu_pages", "recalled_pages"):
        if not state[name] > 0:
            raise DemoFailed(f"kv_offload.{name} is {state[name]}, not more than 0: {state}")
    if state["worker"]["state"] != "ready":
        raise DemoFailed(f"the CPU attention process is not ready: {state['worker']}")


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


def use_cluster(cluster: PDCluster, model: Path, args: argparse.Namespace) -> None:
    """Everything between starting and stopping the servers."""
    before = state = offload_state(cluster, args)
    say(f"questions: --kv-offload {args.kv_offload}, budget {args.budget} tokens")
    if args.model == "smollm2":
        if state:
            say("'full' is a second decode server whose budget covers the text")
        converse(cluster, model)
    else:
        question = "Read the text below and say in a few words what it is about."
        print(f"\n  question: {question} (+ text)")
        text = text_of_tokens(model, max(args.input_len, 4096))
        chat(cluster, model, f"{question}\n\n{text}")
    state = offload_state(cluster, args)
    if state:
        names = ("steps", "selected_pages", "cpu_pages", "recalled_pages", "fallback_pages")
        print("\n  counters: " + ", ".join(f"{n} {state[n] - before[n]}" for n in names))
    prompts = f"{args.prompts} prompts of {args.input_len} tokens"
    say(f"bench_serving: {prompts}, {args.concurrency} at once")
    bench = run_bench(cluster, model, args)
    state = offload_state(cluster, args)
    print_report(bench, state, cluster.servers["decode"].log())
    if state:
        check_offload(state)
    for server in cluster.all_servers():
        server.check()


def run(args: argparse.Namespace, where: placement.Placement, log_dir: Path) -> None:
    """The demo; raises DemoFailed, Unavailable or ServerFailed. No process is left, whatever happens."""
    say(f"model: {args.model}" + " (downloaded once)" * (args.model == "smollm2"))
    model = find_model(args.model)
    what = f"{model.name}, --kv-offload {args.kv_offload}, {where}"
    say(f"starting the servers, which takes a minute or two: {what}")
    cluster = make_cluster(args, where, model, log_dir)
    try:
        with cluster:
            say(f"all ready after {cluster.startup_s:.0f} s, {len(cluster.processes())} processes")
            use_cluster(cluster, model, args)
            say("stopping the servers")
            if outlived := cluster.stop():
                raise DemoFailed(f"processes did not stop by themselves: {outlived}")
    except (DemoFailed, RequestFailed, Unavailable, OSError, ValueError, KeyError) as error:
        raise DemoFailed(f"{type(error).__name__}: {error}\n{cluster.tails(15)}") from error
    if cluster.processes():
        raise DemoFailed(f"still running: {cluster.processes()}")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        where = placement.place(args.device)
    except ConfigError as error:
        print(f"scripts/demo.sh: {error}", file=sys.stderr)
        return 2
    # Clean up as after Ctrl-C. Raised here, not forwarded: a shell's background job ignores SIGINT.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    log_dir = Path(tempfile.mkdtemp(prefix="sglang-scout-demo-"))
    try:
        run(args, where, log_dir)
    except (DemoFailed, ServerFailed, Unavailable) as error:
        print(f"\n{error}\n\ndemo: FAILED; logs are in {log_dir}", file=sys.stderr)
        if where.decode != placement.CPU:
            print("to run without the GPU: scripts/demo.sh --device cpu", file=sys.stderr)
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
