#!/usr/bin/env python3
"""The main job on one machine: prefill and decode server, router, questions and bench_serving.

Run it as scripts/demo.sh, which does the set-up first. A small language model answers three questions
about a real text, one of them about a fact hidden in it. Each answer is shown as it is made, and
below it that of full attention. Exit status 0 means: every request was answered in full, the hidden
fact was found, the CPU worker computed pages, pages were recalled, and no process is left.

--model recall serves a model of this project that finds facts (benchmark/accuracy/recall_model), and
checks what it finds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
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
from texts import load_text

ROOT = Path(__file__).resolve().parents[1]
RECALL_MODEL = ROOT / "benchmark" / "accuracy" / "recall_model"
sys.path[:0] = [str(RECALL_MODEL.parent), str(ROOT / "test")]

import tasks  # noqa: E402

from servers import placement  # noqa: E402
from servers.pd_cluster import PDCluster, flags  # noqa: E402
from servers.server_process import ServerFailed  # noqa: E402
from servers.sglang_http import RequestFailed, sse_events  # noqa: E402

QUESTION_TASKS = ("needle", "multi_key", "variables")
SEED = 4242
QUESTION = "Read the text below and say in a few words what it is about."
CHAT_TOKENS = 48
TEXT_TOKENS = 5800
NUMBER = "7413"
FACT = f"The secret number of the lighthouse is {NUMBER}."
FACT_QUESTION = "What is the secret number of the lighthouse?"
QUESTIONS = (
    FACT_QUESTION,
    "What is this text about? Answer in one sentence.",
    "Who built the ark, and why?",
)
BEGIN = time.monotonic()


@dataclass(frozen=True)
class Job:
    """What is served and asked: defaults of the flags, and keys of ``--kv-offload-config``."""

    budget: int
    prompts: int
    input_len: int
    config: dict[str, Any] = field(default_factory=dict)
    cpu_dtype: str = "bfloat16"
    output_len: int = 64


# Keys of the recall model have no channels that stand out, and layer 1 asks for what layer 0 has just gathered.
RECALL = Job(512, 16, 4096, {"digest": "signs", "exact_layers": [1], "resident_bonus": 1.0})
OWN = Job(512, 16, 4096)
# Without AMX, CPUs are several times slower in bfloat16.
SMOLLM2 = Job(1024, 4, 1536, {"digest": "signs"}, "float32", output_len=32)
JOBS = {"smollm2": SMOLLM2, "recall": RECALL}


class DemoFailed(RuntimeError):
    """Something that the demo promises did not happen."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGIN:6.1f} s] {text}", flush=True)


TIMES: dict[str, float] = {}


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Adds the time that its block takes to the table at the end."""
    begin = time.monotonic()
    yield
    TIMES[name] = time.monotonic() - begin


def print_times() -> None:
    print("how the time was spent")
    for name, seconds in {**TIMES, "all": sum(TIMES.values())}.items():
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
    add("--device", default="auto", choices=placement.CHOICES, help="auto: a GPU if it can be used")
    add("--kv-offload", default="scout", metavar="POLICY", help="of both servers")
    size = dict(type=int, default=argparse.SUPPRESS)
    add("--budget", metavar="TOKENS", help="--kv-offload-budget", **size)
    add("--prompts", help="requests of bench_serving", **size)
    add("--concurrency", help="of them at once", **size)
    add("--input-len", metavar="TOKENS", help="of each of its prompts", **size)
    add("--output-len", metavar="TOKENS", help="of each of its answers", **size)
    add("--keep-logs", action="store_true", help="keep the logs also when all went well")
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
    # Room for twice as many. The device cache is sized for that, and what fits stays: the requests
    # of the demo have two budgets each.
    room = 2 * requests
    # SGLang's own choice of this share goes below zero on a CPU with the prefill size set below.
    prefill, decode = where.memory(cpu_share=0.5)
    common, more_decodes = [], {}
    if args.kv_offload != "none":
        common = flags(kv_offload=args.kv_offload, kv_offload_budget=args.budget)
        shared = args.job.config
        if args.job is SMOLLM2:
            # One text at a time: of what is resident it would soon need nothing else.
            cache = {"resident_tokens": 2 * args.budget}
            more_decodes["full"] = full_attention(decode, shared)
        elif where.decode == placement.CUDA:
            # It would otherwise be what the memory leaves, and nothing be left to the CPU.
            cache = {"resident_tokens": room * args.budget}
        else:
            cache = {}
        for options, config in ((prefill, shared | where.prefill_config), (decode, shared | cache)):
            if config:
                options["kv_offload_config"] = json.dumps(config)
    max_total_tokens = max((requests + 2) * tokens_per_request, 3 * TEXT_TOKENS)
    if where.prefill == placement.CPU:
        # All waiting prompts in one prefill batch: the decode server then gets them at about the
        # same time and really runs them together. A GPU needs no help for that.
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
        # While the CPU prefills long prompts, a server does not answer in time.
        router_args=flags(health_failure_threshold=100),
        ready_timeout_s=where.ready_timeout_s,
    )


def full_attention(decode: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Flags of a decode server whose budget covers the text: all its pages stay on the device."""
    budget = (TEXT_TOKENS + 512) // 32 * 32
    offload = dict(kv_offload_budget=budget, kv_offload_config=json.dumps(config))
    return flags(**decode, **offload, max_running_requests=1)


def text_of_tokens(model: Path, tokens: int, start: int = 0) -> str:
    """So many tokens of a text, from this one on. Of a model without tokenizer.json one has 4 characters."""
    text = load_text("prose")
    if not (model / "tokenizer.json").is_file():
        return text[4 * start : 4 * (start + tokens)]
    from tokenizers import Tokenizer

    # No token is shorter than a byte: enough characters to count so many tokens in.
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    offsets = tokenizer.encode(text[: 8 * (start + tokens)], add_special_tokens=False).offsets
    return text[offsets[start][0] : offsets[start + tokens - 1][1]]


def bench_texts(args: argparse.Namespace, model: Path) -> Iterator[tuple[str, str]]:
    """Prompts and answers for bench_serving, of the tasks that the recall model knows, or of the text."""
    for index in range(args.prompts):
        if args.job is RECALL:
            task = tasks.TASKS[index % len(tasks.TASKS)]
            sample = tasks.make_sample(task, args.input_len, SEED + index)
            yield sample.prompt_text, sample.answer_text
        else:
            begin = TEXT_TOKENS + index * args.input_len
            yield text_of_tokens(model, args.input_len, begin), "."


def bench_prompts(cluster: PDCluster, model: Path, args: argparse.Namespace) -> list[str]:
    """Flags of bench_serving that name its prompts."""
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


def chat_payload(model: Path, content: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return dict(model=str(model), messages=messages, max_tokens=max_tokens, temperature=0)


def chat(cluster: PDCluster, model: Path, content: str, max_tokens: int) -> str:
    """One chat completion, printed as it comes, then a line on its tokens and times."""
    payload = chat_payload(model, content, max_tokens)
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
        answer = chat(cluster, model, content, CHAT_TOKENS)
        if "full" in cluster.servers:
            payload = chat_payload(model, content, CHAT_TOKENS)
            full = cluster.ask_pair(payload, "full", "/v1/chat/completions")
            print(f"  full:     {full['choices'][0]['message']['content']}")
        if question == FACT_QUESTION and NUMBER not in answer:
            raise DemoFailed(f"the secret number in the text is {NUMBER}")


def ask_facts(cluster: PDCluster, model: Path, args: argparse.Namespace) -> None:
    """Asks the recall model for facts in long texts. Raises DemoFailed unless it finds them all."""
    for index, task in enumerate(QUESTION_TASKS):
        sample = tasks.make_sample(task, max(args.input_len, 4096), SEED - 1 - index)
        asked = tasks.to_text(sample.prompt[-4:])
        print(f"\n  {task}: ... {asked}")
        answer = chat(cluster, model, sample.prompt_text, len(sample.answer))
        if not tasks.is_correct(task, sample.answer, tasks.to_ids(answer.strip())):
            raise DemoFailed(f"the right answer to {asked!r} is {sample.answer_text!r}")


def ask_about_text(cluster: PDCluster, model: Path, args: argparse.Namespace) -> None:
    """One question about a real text, to a model of which nothing is known."""
    print(f"\n  question: {QUESTION} (+ text)")
    text = text_of_tokens(model, max(args.input_len, 4096))
    chat(cluster, model, f"{QUESTION}\n\n{text}", CHAT_TOKENS)


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
    """What decides about the answers."""
    if args.kv_offload == "none":
        return "stock SGLang"
    text = f"{args.kv_offload} attends to {args.budget} tokens in full pages"
    if args.job.config:
        text += f", with {json.dumps(args.job.config)}"
    if args.job is SMOLLM2:
        text += "; full attention is a second decode server, with a budget that covers the text"
    return text


def run(args: argparse.Namespace, where: placement.Placement, log_dir: Path) -> None:
    """The demo; raises DemoFailed or ServerFailed. No process is left, whatever happens."""
    with stage("model and text"):
        model = find_model(args.model)
    say(f"starting the servers: {model.name}, --kv-offload {args.kv_offload}, {where}")
    cluster = make_cluster(args, where, model, log_dir)
    try:
        with cluster:
            TIMES["server start"] = cluster.startup_s
            say(f"ready after {cluster.startup_s:.0f} s, {len(cluster.processes())} processes")
            use_cluster(cluster, model, args)
            say("stopping the servers")
            with stage("stop"):
                outlived = cluster.stop()
            if outlived:
                raise DemoFailed(f"processes had to be killed one by one: {outlived}")
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
    # Clean up as after Ctrl-C. Raised here, not sent on: a background job of a shell ignores SIGINT.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    log_dir = Path(tempfile.mkdtemp(prefix="sglang-scout-demo-"))
    TIMES["set-up"] = float(os.environ.get("SCOUT_SETUP_S", 0))
    try:
        run(args, where, log_dir)
    except (DemoFailed, ServerFailed) as error:
        print(f"\n{error}\n\ndemo: FAILED; logs are in {log_dir}", file=sys.stderr)
        if where.decode != placement.CPU:
            print("without the GPU: scripts/demo.sh --device cpu", file=sys.stderr)
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
