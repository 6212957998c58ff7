#!/usr/bin/env python3
"""End-to-end demo on one machine: prefill and decode server, router, questions and bench_serving.

Run it as scripts/demo.sh, which does the set-up first. A small language model answers three questions
about a real text, one of them about a fact hidden in it. Each answer is streamed, followed by that of
full attention. Exit status 0 means: every request was answered in full, the hidden fact was found,
the CPU attention process computed pages, pages were recalled, and no process is left.

--model recall serves this project's retrieval model (benchmark/accuracy/recall_model), and checks
its answers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packages import Unavailable
from sglang_scout.core.errors import ConfigError
from smollm2 import smollm2

ROOT = Path(__file__).resolve().parents[1]
RECALL_MODEL = ROOT / "benchmark" / "accuracy" / "recall_model"
sys.path.insert(0, str(ROOT))  # for benchmark, which adds test/ with the server launchers

import benchmark  # noqa: E402, F401
from demo_bench import print_report, run_bench  # noqa: E402
from demo_questions import (  # noqa: E402
    TEXT_TOKENS,
    DemoFailed,
    ask_about_text,
    ask_facts,
    converse,
)
from servers import placement  # noqa: E402
from servers.pd_cluster import PDCluster, flags  # noqa: E402
from servers.server_process import ServerFailed  # noqa: E402
from servers.sglang_http import RequestFailed  # noqa: E402

BEGIN = time.monotonic()


@dataclass(frozen=True)
class Job:
    """What a model is asked: defaults of the flags, and keys of ``--kv-offload-config``."""

    budget: int
    prompts: int
    input_len: int
    config: dict[str, Any] = field(default_factory=dict)
    cpu_dtype: str = "bfloat16"
    output_len: int = 64


# Layer 1 of the recall model queries what layer 0 has just written, which prediction misses.
RECALL = Job(512, 16, 4096, {"exact_layers": [1]})
OWN = Job(512, 16, 4096)
# Without AMX, CPUs are several times slower in bfloat16.
SMOLLM2 = Job(512, 4, 512, {}, "float32", output_len=16)
JOBS = {"smollm2": SMOLLM2, "recall": RECALL}


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGIN:6.1f} s] {text}", flush=True)


TIMES: dict[str, float] = {}


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Records the duration of its block for the table at the end."""
    begin = time.monotonic()
    yield
    TIMES[name] = time.monotonic() - begin


def print_times() -> None:
    print("time spent")
    for name, seconds in {**TIMES, "total": sum(TIMES.values())}.items():
        print(f"  {name:<22} {seconds:4.0f} s")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo.sh",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="; ".join(
            f"--model {name}: --budget {job.budget} --prompts {job.prompts} --concurrency "
            f"{job.prompts} --input-len {job.input_len} --output-len {job.output_len}"
            for name, job in {**JOBS, "PATH": OWN}.items()
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2, recall, or the folder of your own model")
    add(
        "--device",
        default="auto",
        choices=placement.CHOICES,
        help="auto takes a GPU if it can be used",
    )
    add("--kv-offload", default="scout", metavar="POLICY", help="policy of both servers")
    size = dict(type=int, default=argparse.SUPPRESS)
    add("--budget", metavar="TOKENS", help="value of --kv-offload-budget", **size)
    add("--prompts", help="requests that bench_serving sends", **size)
    add("--concurrency", help="requests at the same time", **size)
    add("--input-len", metavar="TOKENS", help="input tokens per request", **size)
    add("--output-len", metavar="TOKENS", help="output tokens per request", **size)
    add("--keep-logs", action="store_true", help="keep the logs also if the demo succeeds")
    args = parser.parse_args(argv)
    args.job = JOBS.get(args.model, OWN)
    for name in ("budget", "prompts", "input_len", "output_len"):
        setattr(args, name, getattr(args, name, getattr(args.job, name)))
    args.concurrency = getattr(args, "concurrency", args.prompts)
    return args


def find_model(name: str) -> Path:
    """The folder of ``--model``. Raises DemoFailed."""
    try:
        model = {"smollm2": smollm2, "recall": lambda: RECALL_MODEL}.get(name, lambda: Path(name))()
    except Unavailable as error:
        raise DemoFailed(str(error)) from error
    if not (model / "config.json").is_file():
        raise DemoFailed(f"--model {name}: no config.json there; give the folder of a model")
    return model.resolve()


def make_cluster(
    args: argparse.Namespace, where: placement.Placement, model: Path, log_dir: Path
) -> PDCluster:
    """The servers, sized for the demo's requests with some room."""
    requests = max(args.concurrency, 8)
    tokens_per_request = args.input_len + args.output_len + 256
    # Room for twice as many. The device cache is sized accordingly, and what fits stays resident:
    # the requests of the demo have two budgets each.
    room = 2 * requests
    # SGLang's default for this share becomes negative on a CPU with the prefill size set below.
    prefill, decode = where.memory(cpu_share=0.5)
    common, more_decodes = [], {}
    if args.kv_offload != "none":
        common = flags(kv_offload=args.kv_offload, kv_offload_budget=args.budget)
        shared = args.job.config
        if args.job is SMOLLM2:
            # One text at a time: soon everything it needs would be resident.
            cache = {"resident_tokens": 2 * args.budget}
            more_decodes["full"] = full_attention(decode, shared)
        elif where.decode == placement.CUDA:
            # The default is all free memory, which would leave no pages to the CPU.
            cache = {"resident_tokens": room * args.budget}
        else:
            cache = {}
        for options, config in ((prefill, shared | where.prefill_config), (decode, shared | cache)):
            if config:
                options["kv_offload_config"] = json.dumps(config)
    max_total_tokens = max((requests + 2) * tokens_per_request, 3 * TEXT_TOKENS)
    if where.prefill == placement.CPU:
        # All waiting prompts in one prefill batch: the decode server then gets them at about the
        # same time and runs them as a batch. Not needed on a GPU.
        prefill |= {"max_prefill_tokens": max_total_tokens}
        prefill |= {"chunked_prefill_size": -1}
    return PDCluster(
        model,
        device=where.decode,
        prefill_device=where.prefill,
        one_by_one=where.one_gpu_for_both or bool(more_decodes) and where.decode == placement.CUDA,
        dtype=args.job.cpu_dtype if placement.CPU in (where.prefill, where.decode) else "bfloat16",
        log_dir=log_dir,
        max_running_requests=room,
        max_total_tokens=max_total_tokens,
        server_args=common,
        prefill_args=flags(**prefill),
        decode_args=flags(**decode, decode_log_interval=5),
        more_decodes=more_decodes,
        # While the CPU prefills long prompts, a server's health checks time out.
        router_args=flags(health_failure_threshold=100),
        ready_timeout_s=where.ready_timeout_s,
        on_ready=lambda name: say(f"the {name} server is ready"),
    )


def full_attention(decode: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Flags of a decode server whose budget covers the text: all its pages stay on the device."""
    budget = (TEXT_TOKENS + 512) // 32 * 32
    offload = dict(kv_offload_budget=budget, kv_offload_config=json.dumps(config))
    return flags(**decode, **offload, max_running_requests=1)


def offload_state(cluster: PDCluster, args: argparse.Namespace) -> dict[str, Any]:
    return {} if args.kv_offload == "none" else cluster.kv_offload("decode")


def check_offload(state: dict[str, Any]) -> None:
    """Raises DemoFailed unless recall, and the CPU where expected, contributed to the answers."""
    copies_ahead = state["policy"] == "infinigen"
    for name in ("recalled_pages",) if copies_ahead else ("cpu_pages", "recalled_pages"):
        if not state[name] > 0:
            raise DemoFailed(
                f"kv_offload.{name} is {state[name]}, expected more than 0; state: {state}"
            )
    if state["worker"]["state"] != "ready":
        raise DemoFailed(f"the CPU attention process is not ready: {state['worker']}")


def use_cluster(cluster: PDCluster, model: Path, args: argparse.Namespace) -> None:
    """Everything between starting and stopping the servers."""
    before = offload_state(cluster, args)
    say(f"questions: {describe(args)}")
    with stage("questions"):
        if args.job is SMOLLM2:
            converse(cluster, model)
        elif args.job is RECALL:
            ask_facts(cluster, model, args)
        else:
            ask_about_text(cluster, model, args)
    state = offload_state(cluster, args)
    if state:
        names = ("steps", "selected_pages", "cpu_pages", "recalled_pages", "fallback_pages")
        print("\n  counters: " + ", ".join(f"{n} {state[n] - before[n]}" for n in names))
    say(
        f"bench_serving: {args.prompts} prompts of {args.input_len} tokens, "
        f"{args.concurrency} at once"
    )
    with stage("bench_serving"):
        bench = run_bench(cluster, model, args)
    state = offload_state(cluster, args)
    print_report(bench, state, cluster.servers["decode"].log())
    if state:
        check_offload(state)
    for server in cluster.all_servers():
        server.check()


def describe(args: argparse.Namespace) -> str:
    """The settings that determine the answers."""
    if args.kv_offload == "none":
        return "stock SGLang"
    text = f"{args.kv_offload} with a budget of {args.budget} tokens"
    if args.job.config:
        text += f" and {json.dumps(args.job.config)}"
    if args.job is SMOLLM2:
        text += "; for comparison, 'full' comes from a second decode server whose budget covers the text"
    return text


def run(args: argparse.Namespace, where: placement.Placement, log_dir: Path) -> None:
    """The demo; raises DemoFailed or ServerFailed. No process is left, whatever happens."""
    say(f"model: {args.model}" + " (downloaded once)" * (args.job is SMOLLM2))
    with stage("model and text"):
        model = find_model(args.model)
    say(
        f"starting the servers, which takes a minute or two: {model.name}, --kv-offload {args.kv_offload}, {where}"
    )
    cluster = make_cluster(args, where, model, log_dir)
    try:
        with cluster:
            TIMES["server start"] = cluster.startup_s
            say(f"all ready after {cluster.startup_s:.0f} s, {len(cluster.processes())} processes")
            use_cluster(cluster, model, args)
            say("stopping the servers")
            with stage("stop"):
                outlived = cluster.stop()
            if outlived:
                raise DemoFailed(
                    f"processes did not stop by themselves and were killed: {outlived}"
                )
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
    TIMES["set-up"] = float(os.environ.get("SCOUT_SETUP_S", 0))
    try:
        run(args, where, log_dir)
    except (DemoFailed, ServerFailed) as error:
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
    print_times()
    say("done: every request answered, nothing left running")
    return 0


if __name__ == "__main__":
    sys.exit(main())
