"""A decode server with --kv-offload scout on a CUDA device, without a prefill server: correctness and speed.

    python -m benchmark.server.gpu_server --out FILE            checks, on a small model with random weights
    python -m benchmark.server.gpu_server --out FILE --speed    decode throughput of a large model's shape (speed.py)

Keys and values of prompts are noise (``dummy_kv``), the same for the same prompt. Checked at batches of 1 to 16 with a
budget far below the context, a row each:

    verify      every layer of the server without graphs equals attention over the selected pages
    tokens      are the same with and without captured graphs: for single requests, except where the two best tokens
                are closer than rounding; for several at once, most first tokens must agree (`count_apart`)
    state       of /server_info: pages that the CPU computed, none in use after the last request
    graphs      were replayed in every step, and in none of the other server

On a CUDA device both servers run at the same time, each with CPUs of its own for the attention process.

--device cpu runs the checks with the ring's kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmark import rows
from benchmark.server.decode_server import FAILURES, DecodeServer, make_prompts, offload_flags
from benchmark.server.speed import REHEARSAL, SERVERS, SHAPES, measure_speed
from make_tiny_model import TinyModelSpec, make_tiny_model
from servers.server_process import ends_orderly
from sglang_scout.core.config import DEFAULT_BUDGET_TOKENS
from sglang_scout.worker.host_memory import available_bytes

Answers = list[list[tuple[int, float]]]  # per request its tokens and their log-probabilities
BUDGET_TOKENS = 128
VERIFY_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Largest relative error; bfloat16 outputs alone are off by 0.4 %."""
LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Where captured and eager steps choose different tokens, these were nearly equally likely."""
START_S, REQUEST_S = {"cuda": 75.0, "cpu": 300.0}, {"cuda": 25.0, "cpu": 600.0}
"""Timeouts for a server to start, including kernel compilation, and to answer one batch."""
PAGE, WORKER_CPUS = 32, 4


def differences(eager: Answers, graph: Answers, tolerance: float) -> tuple[list[str], int]:
    """Problems, and how many requests diverge at a tie between two tokens.

    After the first token that differs, two answers are not comparable.
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


def count_apart(eager: Answers, graph: Answers, tolerance: float) -> int:
    """Requests whose first decoded tokens have nothing in common.

    Requests that are sent at once need not join the batch in the same steps, so sums round differently, and
    occasionally another page is selected. Then a request diverges; wrong steps make nearly all diverge.
    """
    count = 0
    for left, right in zip(eager, graph, strict=True):
        if min(len(left), len(right)) < 2:  # too short: reported separately
            continue
        (token, score), (other, other_score) = left[1], right[1]
        count += token != other or not abs(score - other_score) <= tolerance
    return count


def token_problems(
    eager: dict[int, Answers], graph: dict[int, Answers], device: str, tolerance: float
) -> tuple[list[str], dict[str, int]]:
    """Problems with the answers of captured steps, by batch size, and how many requests diverge for which reason."""
    wrong, ties, apart, together = [], 0, 0, 0
    for size, answers in eager.items():
        found, parted = differences(answers, graph[size], tolerance)
        if size == 1 or device == "cpu":  # arithmetic independent of the batch
            wrong += [f"batch {size}, {line}" for line in found]
            ties += parted
        else:
            wrong += [f"batch {size}, {line}" for line in found if line.endswith(" tokens")]
            apart, together = apart + count_apart(answers, graph[size], tolerance), together + size
    if apart > together // 4:
        wrong.append(f"the first tokens of {apart} of {together} requests have nothing in common")
    return wrong, {"ties": ties, "apart": apart, "requests": sum(eager)}


def state_problems(state: dict[str, Any]) -> list[str]:
    """Problems with the state of a server after its last request."""
    worker = state["worker"]
    expected = {
        "policy": state["policy"] == "scout",
        "steps": state["steps"] > 0,
        "selected_pages": state["selected_pages"] > 0,
        "cpu_pages": state["cpu_pages"] > 0,
        "recalled_pages": state["recalled_pages"] > 0,
        "host_pages_used": state["host_pages_used"] == 0,
        "fallback_pages": state["fallback_pages"] == 0,
        "worker.restarts": worker["restarts"] == 0,
    }
    shown = {**state, "worker.restarts": worker["restarts"]}
    return [f"{name} = {shown[name]!r}" for name, fine in expected.items() if not fine]


def graph_problems(log: str, replayed: bool) -> list[str]:
    """Checks in a server's log whether a graph ran its decode steps."""
    said = set(re.findall(r"Decode batch.*cuda graph: (\w+)", log))
    return [] if said == {str(replayed)} else [f"steps replayed a graph: {said or 'unknown'}"]


def ask_all(server: DecodeServer, options: argparse.Namespace) -> dict[int, Answers]:
    """Answers per batch size. All requests of one size start together."""
    answers = {}
    for size in options.batch:
        lengths = [options.context - 37 * row for row in range(size)]
        prompts = make_prompts(lengths, 500, seed=size)
        answers[size] = server.generate(prompts, options.tokens, REQUEST_S[options.device])
    return answers


def server_flags(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Flags common to both servers of the checks."""
    most = max(options.batch)
    total = 2 * most * (options.context + options.tokens + PAGE)
    common = {"dtype": dtype, "max_running_requests": most, "max_total_tokens": total}
    if options.device != "cpu":
        # Not disable_cuda_graph_padding: with it this SGLang looks up graphs by a key that none has.
        common |= {"cuda_graph_max_bs_decode": most, "mem_fraction_static": 0.5}
        common |= {"decode_log_interval": 1}  # logs for each step whether a graph ran it
    return common


def worker_cpus(name: str) -> str | None:
    """CPUs of a server's attention process where both run at once; None: the default."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 4 * WORKER_CPUS:
        return None
    end = len(cpus) - WORKER_CPUS * (name == "eager")
    return ",".join(map(str, cpus[end - WORKER_CPUS : end]))


class Checks:
    """Rows of the checks, and the two servers that they need: one without graphs, one with them."""

    def __init__(self, writer: rows.Writer, options: argparse.Namespace, logs: Path, model: Path):
        self.failed = 0
        self._writer, self._options, self._logs, self._model = writer, options, logs, model
        self._dtype = "float32" if options.device == "cpu" else "bfloat16"

    def run(self) -> None:
        on_cpu = self._options.device == "cpu"
        spec = TinyModelSpec(dtype=self._dtype, head_dim=64 if on_cpu else 128)
        make_tiny_model(spec, self._model)
        with ThreadPoolExecutor(1 if on_cpu else 2) as pool:
            eager, graph = pool.map(self._serve, ("eager", "graph"))
        if eager and graph:
            tolerance = LOGPROB_TOLERANCE[self._dtype]
            wrong, found = token_problems(eager, graph, self._options.device, tolerance)
            self._row("tokens", wrong, **found)

    def _row(self, name: str, wrong: list[str], **more: Any) -> None:
        self.failed += bool(wrong)
        status, reason = "failed" if wrong else "ok", "; ".join(wrong)[:1000]
        self._writer.add("scout", status, reason, check=name, untimed=True, **more)
        print(f"{name}: {reason or 'ok'} {more or ''}", flush=True)

    def _serve(self, name: str) -> dict[int, Answers]:
        """The answers of a server, and rows about its state; no answers if it fails."""
        options, log = self._options, self._logs / f"server-{name}.log"
        is_eager, on_cpu = name == "eager", options.device == "cpu"
        flags = server_flags(options, self._dtype) | offload_flags(
            options.device, budget=BUDGET_TOKENS, host_gb=options.check_host_gb, recall="fixed",
            resident_tokens=BUDGET_TOKENS * max(options.batch), verify=is_eager,
        )  # fmt: skip
        flags |= {"disable_cuda_graph": True} if is_eager else {}
        if not on_cpu and (cpus := worker_cpus(name)):
            flags["kv_offload_cpus"] = cpus
        try:
            with DecodeServer(
                self._model, flags, device=options.device, log=log,
                ready_timeout_s=START_S[options.device],
            ) as server:  # fmt: skip
                answers, state = ask_all(server, options), server.kv_offload()
        except FAILURES as error:
            self._row(f"server-{name}", [f"{type(error).__name__}: {error}"[-1000:]])
            return {}
        wrong = state_problems(state)
        counts = {name: state[name] for name in ("steps", "cpu_pages", "recalled_pages")}
        if is_eager:
            counts = {
                "max_rel_error": state["verify_max_rel_error"],
                "checks": state["verify_checks"],
            }
            if not (
                counts["checks"] > 0
                and 0 < counts["max_rel_error"] <= VERIFY_TOLERANCE[self._dtype]
            ):
                wrong.append(
                    f"verify_max_rel_error = {counts['max_rel_error']}, of {counts['checks']} checks"
                )
        self._row("verify" if is_eager else "state", wrong, **counts)
        if not on_cpu:
            wrong = graph_problems(log.read_text(errors="replace"), not is_eager)
            self._row("graphs", wrong, server=name)
        return answers


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON lines file to append to")
    add("--logs", type=Path, help="folder for the servers' logs; default: the folder of --out")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--batch", type=lambda s: [int(x) for x in s.split(",")], default=[1, 3, 16])
    add("--context", type=int, default=1500, help="prompt tokens in the checks")
    add("--tokens", type=int, default=24, help="output tokens in the checks")
    add("--check-host-gb", type=float, default=2.0)
    add("--speed", action="store_true", help="measure speed instead of the checks")
    add("--rehearse", action="store_true", help="like --speed, but at small sizes")
    add("--model", choices=SHAPES, default="qwen3-14b", help="model shape for --speed")
    add("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="servers for --speed")
    add("--speed-context", nargs="+", type=int, default=[32768])
    add("--speed-tokens", type=int, default=256)
    host_gb = round(0.8 * available_bytes() / 2**30, 1)
    add("--host-gb", type=float, default=host_gb, help="GiB of host pages for --speed")
    add("--budget", type=int, default=DEFAULT_BUDGET_TOKENS, help="budget for --speed")
    options = parser.parse_args(argv)
    if options.rehearse:
        vars(options).update(REHEARSAL)
    if options.speed and options.device == "cpu":
        parser.error("--speed needs --device cuda")
    if min(options.context - 37 * max(options.batch), options.tokens - 2) <= 0:
        parser.error("--context and --tokens are too small for --batch")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        print("no CUDA device: --device cpu runs the checks", file=sys.stderr)
        return 2
    packages = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python")
    shared = rows.environment("gpu_server", packages, cuda=cuda)
    shared["device"] = torch.cuda.get_device_name() if cuda else "cpu"
    shared |= {"rehearsal": True} if options.rehearse else {}
    writer = rows.Writer(options.out, shared, append=True)
    logs = options.logs or options.out.parent
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-server-") as scratch, ends_orderly():
        if options.speed:
            failed = measure_speed(writer, options, logs, Path(scratch))
        else:
            checks = Checks(writer, options, logs, Path(scratch) / "model")
            checks.run()
            failed = checks.failed
    writer.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
