#!/usr/bin/env python3
"""A decode server with --kv-offload scout on a CUDA device, without a prefill server: is it right, how fast?

    benchmark/gpu_server.py --out FILE              checks, on a small model with random weights
    benchmark/gpu_server.py --out FILE --speed      decode throughput at the shape of a large model instead

Prompts' keys and values are noise (``dummy_kv``), the same for the same prompt. Checked, at batches of 1 to
16 with a budget far below the context:

    tokens      with captured graphs as without: of single requests, but where the two best tokens are closer
                than rounding; of several at once, for whose first tokens most have to agree, see `strangers`
    verify      every layer of the server without graphs equals attention to the chosen pages
    graphs      were replayed in every step, and in none of the other server. Those of batches of 3 and 5 have
                rows without a request, as SGLang captures no graph of these sizes
    state       of /server_info: pages that the CPU computed, none in use after the last request
    fallback    the worker is killed in mid-decode; all requests end, with the tokens that they had before

Each has a row, in this order but for the graphs, which are last; what --seconds did not suffice for is skipped.

Speed: requests of one length at once, ours at the largest batch that host memory holds, stock SGLang at the largest
that its device memory holds; dummy weights. Which servers, and in which order, --sides says:

    scout-budget      as many pages resident as all requests select, as in the paper (resident_tokens)
    stock-triton      with Triton's attention
    stock-flashinfer  with FlashInfer's, which is compiled when the server starts
    scout-device      all pages resident that the device's memory holds; the selected ones are attended to

Each is measured twice, a row each time; run_to_run is the difference over the mean. samples_us are the times between
a request's tokens while all of them decode, without the first 50 steps. Of the same time are cpu_compute_ratio,
fallback_pages and wait_share, in which the device waited for the worker. Rows name the attention that ran and have the
server's memory, graphs and capacities, as /server_info says them.

--device cpu runs the checks with the ring's kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

import nvidia_smi
import rows
from checks_in_time import OutOfTime, Report, TimeLimit
from decode_server import FAILURES, DecodeServer, offload, prompts_of
from server_speed import DEVICE_FREE_S, SHAPES, SIDES, speed
from sglang_scout.worker.host_memory import available_bytes

sys.path.insert(0, str(rows.ROOT / "scripts"))
from make_tiny_model import TinyModelSpec, make_tiny_model  # noqa: E402

Answers = list[list[tuple[int, float]]]

BUDGET_TOKENS = 128
VERIFY_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Largest relative error; bfloat16 outputs alone are off by 0.4 %."""
LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Where captured and eager steps choose different tokens, these were as good as equal."""
START_S, REQUEST_S = 300.0, {"cuda": 180.0, "cpu": 600.0}
"""The longest that a server may take to start, which compiles kernels, and to answer one batch."""
LEAST_START_S, LEAST_KILL_S = 60.0, 20.0
"""With less time left a server is not started, and a worker not killed."""


# Checks ------------------------------------------------------------------------------------------


def differences(eager: Answers, graph: Answers, tolerance: float) -> tuple[list[str], int]:
    """What is wrong, and how many requests part where two tokens are as good as equal.

    Behind the first token that differs two answers have nothing in common.
    """
    wrong, ties = [], 0
    for row, (left, right) in enumerate(zip(eager, graph, strict=True)):
        if len(left) != len(right):
            wrong.append(f"request {row}: {len(left)} and {len(right)} tokens")
            continue
        for at, ((token, score), (other, other_score)) in enumerate(zip(left, right, strict=True)):
            gap = abs(score - other_score)
            if not gap <= tolerance:
                wrong.append(f"request {row}, token {at}: log-probabilities differ by {gap:.3g}")
            if token != other:
                ties += 1
            if token != other or not gap <= tolerance:
                break
    return wrong, ties


def strangers(eager: Answers, graph: Answers, tolerance: float) -> int:
    """Requests whose first decoded tokens have nothing in common.

    Requests that are sent at once need not join the batch in the same steps, so sums round differently, and
    now and then another page is selected. That parts a request; steps that are wrong part nearly all.
    """
    count = 0
    for left, right in zip(eager, graph, strict=True):
        if min(len(left), len(right)) < 2:  # of another length is a difference of its own
            continue
        (token, score), (other, other_score) = left[1], right[1]
        count += token != other or not abs(score - other_score) <= tolerance
    return count


def ask_all(
    server: DecodeServer, options: argparse.Namespace, limit: TimeLimit
) -> dict[int, Answers]:
    """Answers per batch size. All requests of one size start together."""
    answers = {}
    for size in options.batch:
        lengths = [options.context - 37 * row for row in range(size)]
        prompts = prompts_of(lengths, 500, seed=size)
        timeout_s = limit.left_s(REQUEST_S[options.device])
        begin = time.monotonic()
        answers[size] = server.generate(prompts, options.tokens, timeout_s)
        print(f"batch {size}: {time.monotonic() - begin:.1f} s", flush=True)
    return answers


def state_problems(state: dict[str, Any], *, fallback: bool) -> list[str]:
    """What is wrong with the state of a server after its last request."""
    worker = state["worker"]
    expected = {
        "policy": state["policy"] == "scout",
        "steps": state["steps"] > 0,
        "selected_pages": state["selected_pages"] > 0,
        "cpu_pages": state["cpu_pages"] > 0,
        "recalled_pages": state["recalled_pages"] > 0,
        "host_pages_used": state["host_pages_used"] == 0,
        "fallback_pages": (state["fallback_pages"] > 0) == fallback,
        "worker.restarts": worker["restarts"] == int(fallback),
    }
    shown = {**state, "worker.restarts": worker["restarts"]}
    return [f"{name} = {shown[name]!r}" for name, fine in expected.items() if not fine]


def graphs_said(log: str) -> set[str]:
    """What a server's log says of its decode steps: whether a graph ran them."""
    return set(re.findall(r"Decode batch.*cuda graph: (\w+)", log))


def kill_worker(server: DecodeServer, options: argparse.Namespace, limit: TimeLimit) -> list[str]:
    """Kill the worker in mid-decode; what is wrong then. Every request has to end."""
    limit.needs(LEAST_KILL_S)
    rows_, tokens = max(options.batch), options.kill_tokens
    prompts = prompts_of([options.context] * rows_, 500, seed=99)
    answers: list[Answers] = []
    errors: list[str] = []

    def state() -> dict[str, Any]:
        return server.kv_offload(limit.left_s(60.0))

    def ask(timeout_s: float) -> None:
        try:
            answers.append(server.generate(prompts, tokens, timeout_s))
        except FAILURES as error:
            errors.append(f"{type(error).__name__}: {error}")

    before = state()
    timeout_s = limit.left_s(REQUEST_S[options.device])
    thread = threading.Thread(target=ask, args=(timeout_s,), daemon=True)
    thread.start()
    while state()["steps"] <= before["steps"] + 4 and thread.is_alive():
        time.sleep(0.02)
    if not thread.is_alive():
        return ["all requests ended before the worker was killed", *errors]
    os.kill(before["worker"]["pid"], signal.SIGKILL)
    thread.join(limit.left_s(timeout_s))
    if not answers or [len(answer) for answer in answers[0]] != [tokens] * rows_:
        limit.left_s()
        ended = f"{len(answers)} of {rows_} requests ended after the worker was killed"
        return [ended, *errors]
    deadline = time.monotonic() + limit.left_s(120.0)
    while state()["host_pages_used"] and time.monotonic() < deadline:
        time.sleep(0.1)
    after = state()
    print(f"fallback_pages after the kill: {after['fallback_pages']}", flush=True)
    return state_problems(after, fallback=True)


def server_flags(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """What both servers of the checks are started with."""
    common: dict[str, Any] = {
        "dtype": dtype,
        "max_running_requests": max(options.batch),
        "max_total_tokens": 2 * max(options.batch) * (options.context + options.kill_tokens),
    }
    if options.device != "cpu":
        # Not disable_cuda_graph_padding: with it this SGLang looks for graphs by a key that none has.
        common |= {"cuda_graph_max_bs_decode": max(options.batch), "mem_fraction_static": 0.5}
        common |= {"decode_log_interval": 1}  # says of each step whether a graph ran it
    return common


@contextlib.contextmanager
def started(
    name: str, model: Path, flags: dict[str, Any], options: argparse.Namespace, logs: Path,
    limit: TimeLimit,
) -> Iterator[DecodeServer]:  # fmt: skip
    """A server of the checks."""
    limit.needs(LEAST_START_S)
    begin, free_mib = time.monotonic(), nvidia_smi.used_mib()
    try:
        with DecodeServer(
            model, flags, device=options.device, log=logs / f"server-{name}.log",
            ready_timeout_s=limit.left_s(START_S),
        ) as server:  # fmt: skip
            print(f"server-{name}: ready after {time.monotonic() - begin:.0f} s", flush=True)
            yield server
    finally:  # the next one takes a share of what it finds free
        nvidia_smi.wait_free(free_mib, DEVICE_FREE_S)


def offload_flags(options: argparse.Namespace, **config: Any) -> dict[str, Any]:
    return offload(options, budget=BUDGET_TOKENS, host_gb=options.check_host_gb, recall="fixed",
                   resident_tokens=BUDGET_TOKENS * max(options.batch), **config)  # fmt: skip


def check_verified(report: Report, state: dict[str, Any], dtype: str) -> None:
    """The state of the server without graphs."""
    error, checks = state["verify_max_rel_error"], state["verify_checks"]
    wrong = state_problems(state, fallback=False)
    if not (checks > 0 and 0 < error <= VERIFY_TOLERANCE[dtype]):
        wrong.append(f"verify_max_rel_error = {error}, of {checks} checks")
    report.add("verify", wrong, max_rel_error=error, checks=checks)


def check_replayed(
    report: Report,
    server: DecodeServer,
    options: argparse.Namespace,
    limit: TimeLimit,
    dtype: str,
    answers: dict[str, dict[int, Answers]],
) -> None:
    """The server with graphs, after its answers."""
    if "eager" in answers:
        wrong, found = tokens_problems(answers, options, LOGPROB_TOLERANCE[dtype])
        report.add("tokens", wrong, **found)
    else:
        report.skip("tokens", "there are no answers of eager steps")
    state = server.kv_offload(limit.left_s(60.0))
    report.add("state", state_problems(state, fallback=False),
               **{name: state[name] for name in ("steps", "cpu_pages", "recalled_pages")})  # fmt: skip
    report.add("fallback", kill_worker(server, options, limit))


def tokens_problems(
    answers: dict[str, dict[int, Answers]], options: argparse.Namespace, tolerance: float
) -> tuple[list[str], dict[str, int]]:
    """What is wrong with the answers of captured steps, and how many requests part for which reason."""
    wrong, ties, apart, together = [], 0, 0, 0
    for size in options.batch:
        pair = answers["eager"][size], answers["graph"][size]
        found, parted = differences(*pair, tolerance)
        if size == 1 or options.device == "cpu":  # whose arithmetic depends on nothing else
            wrong += [f"batch {size}, {line}" for line in found]
            ties += parted
        else:
            wrong += [f"batch {size}, {line}" for line in found if line.endswith(" tokens")]
            apart, together = apart + strangers(*pair, tolerance), together + size
    if apart > together // 4:
        wrong.append(f"the first tokens of {apart} of {together} requests have nothing in common")
    return wrong, {"ties": ties, "apart": apart, "requests": sum(options.batch)}


def check_graphs(report: Report, answered: Collection[str], logs: Path) -> None:
    """By what the logs of the servers that have answered say of their steps."""
    wrong = []
    for name in answered:
        log = logs / f"server-{name}.log"
        said = graphs_said(log.read_text(errors="replace"))
        if said != {str(name == "graph")}:
            wrong.append(f"{log.name}: steps replayed a graph: {said or 'unknown'}")
    if wrong or len(answered) == 2:
        report.add("graphs", wrong)
    else:
        report.skip("graphs", "not both servers have answered")


def check(
    writer: rows.Writer, options: argparse.Namespace, logs: Path, model: Path, end: float
) -> int:
    """Two servers, without graphs and with them. Rows; returns how many checks failed."""
    begin, limit = time.monotonic(), TimeLimit(end)
    on_cpu = options.device == "cpu"
    dtype = "float32" if on_cpu else "bfloat16"
    make_tiny_model(TinyModelSpec(dtype=dtype, head_dim=64 if on_cpu else 128), model)
    common = server_flags(options, dtype)
    answers: dict[str, dict[int, Answers]] = {}
    first, second = Report(writer, ["verify"]), Report(writer, ["tokens", "state", "fallback"])
    for report, name, more in (
        (first, "eager", offload_flags(options, verify=True) | {"disable_cuda_graph": True}),
        (second, "graph", offload_flags(options)),
    ):
        try:
            try:
                with started(name, model, common | more, options, logs, limit) as server:
                    answers[name] = ask_all(server, options, limit)
                    if report is first:
                        check_verified(report, server.kv_offload(limit.left_s(60.0)), dtype)
                    else:
                        check_replayed(report, server, options, limit, dtype, answers)
            except FAILURES as error:
                limit.blame(error)
                report.stop(error)
        except OutOfTime as error:
            report.skip_rest(str(error))
    last = Report(writer, [] if on_cpu else ["graphs"])
    if not on_cpu:
        check_graphs(last, answers, logs)
    print(f"checks: {time.monotonic() - begin:.0f} s", flush=True)
    return sum(report.failed for report in (first, second, last))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser.add_argument("--out", type=Path, required=True, help="JSON lines; more are appended")
    parser.add_argument(
        "--logs", type=Path, help="folder for the servers' logs; default: that of --out"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=numbers, default=[1, 2, 3, 5, 8, 16])
    parser.add_argument("--context", type=int, default=1500, help="of the checks, tokens")
    parser.add_argument("--tokens", type=int, default=40, help="of each answer in the checks")
    parser.add_argument("--kill-tokens", type=int, default=1000, help="where the worker is killed")
    parser.add_argument("--check-host-gb", type=float, default=2.0)
    parser.add_argument("--speed", action="store_true", help="instead of the checks")
    parser.add_argument("--model", type=lambda s: s.split(","), default=["qwen3-8b"])
    parser.add_argument("--speed-context", type=int, default=32768)
    parser.add_argument("--speed-tokens", type=int, default=384)
    parser.add_argument(
        "--host-gb",
        type=float,
        default=min(96.0, round(0.8 * available_bytes() / 2**30, 1)),
        help="of --speed; with less of them more are resident, and fewer requests run than on a device alone",
    )
    parser.add_argument(
        "--sides", type=lambda s: s.split(","), default=list(SIDES), help="of --speed"
    )
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it")
    options = parser.parse_args()
    if unknown := set(options.model) - set(SHAPES):
        parser.error(f"--model {','.join(sorted(unknown))}: choose of {', '.join(SHAPES)}")
    if unknown := set(options.sides) - set(SIDES):
        parser.error(f"--sides {','.join(sorted(unknown))}: choose of {', '.join(SIDES)}")
    if options.speed and options.device == "cpu":
        parser.error("--speed needs --device cuda")
    if min(options.context - 37 * max(options.batch), options.tokens - 2) <= 0:
        parser.error("--context and --tokens are too small for --batch")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: --device cpu runs the checks", file=sys.stderr)
        return 2
    end = time.monotonic() + options.seconds
    packages = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python")
    shared = rows.environment("gpu_server", packages, cuda=options.device == "cuda")
    shared |= {"device": options.device}
    device_bytes = 0
    if options.device == "cuda":
        shared["device"] = torch.cuda.get_device_name()
        device_bytes = torch.cuda.get_device_properties(0).total_memory
    writer = rows.Writer(options.out, shared, append=True)
    logs = options.logs or options.out.parent
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-server-") as scratch:
        if options.speed:
            failed = speed(writer, options, logs, Path(scratch), end, device_bytes)
        else:
            failed = check(writer, options, logs, Path(scratch) / "model", end)
    writer.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
