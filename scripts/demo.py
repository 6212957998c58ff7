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
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from packages import Unavailable
from sglang_scout.core.errors import ConfigError
from smollm2 import smollm2
from texts import load_text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test"))  # for the server launchers

from servers import placement  # noqa: E402
from servers.group import flags  # noqa: E402
from servers.pd_cluster import PDCluster  # noqa: E402
from servers.server_process import ServerFailed  # noqa: E402
from servers.sglang_http import RequestFailed, sse_events  # noqa: E402

BEGIN = time.monotonic()
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
    common, more_decodes = [], {}
    if args.kv_offload != "none":
        common = flags(kv_offload=args.kv_offload, kv_offload_budget=args.budget)
        cache = {}
        if args.model == "smollm2":
            # One text at a time: soon everything it needs would be resident.
            cache = {"resident_tokens": 2 * args.budget}
            # For comparison: its budget covers the text, so all its pages stay on the device.
            whole = (TEXT_TOKENS + 512) // 32 * 32
            more_decodes["full"] = flags(**decode, kv_offload_budget=whole, max_running_requests=1)
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
    return PDCluster(
        model,
        device=where.decode,
        prefill_device=where.prefill,
        one_by_one=where.one_gpu_for_both or bool(more_decodes) and where.decode == placement.CUDA,
        dtype=args.cpu_dtype if placement.CPU in (where.prefill, where.decode) else "bfloat16",
        log_dir=log_dir,
        max_running_requests=room,
        max_total_tokens=max_total_tokens,
        server_args=common,
        prefill_args=flags(**prefill),
        decode_args=flags(**decode, decode_log_interval=5),
        more_decodes=more_decodes,
        # While the CPU prefills long prompts, a server's health checks time out.
        router_args=flags(health_failure_threshold=100),
        # On a GPU kernels may have to be compiled first.
        ready_timeout_s=600.0 if where.decode == placement.CPU else 1200.0,
        on_ready=lambda name: say(f"the {name} server is ready"),
    )


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
        done = subprocess.run(command, env=cluster.client_environment, stdout=sink, **pipes)
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
