"""A decode server with --kv-offload scout on a CUDA device, without a prefill server: correctness and speed.

    python -m benchmark.server.gpu_server --out FILE            checks, on a small model with random weights
    python -m benchmark.server.gpu_server --out FILE --speed    decode throughput of a large model's shape (speed.py)

Keys and values of prompts are noise (``dummy_kv``), the same for the same prompt. Checked at batches of 1 to 16 with a
budget far below the context, a row each:

    verify      every layer of the server without graphs equals attention over the selected pages
    tokens      are the same with and without captured graphs: for single requests, except where the two best tokens
                are closer than rounding; for several at once, most first tokens must agree
    state       of /server_info: pages that the CPU computed, none in use after the last request
    graphs      were replayed in every step, and in none of the other server

On a CUDA device both servers run at the same time, each with CPUs of its own for the attention process.

--device cpu runs the checks at smaller sizes, with the ring's kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmark import rows
from benchmark.decode.model import MODELS
from benchmark.server.decode_server import FAILURES, DecodeServer, make_prompts, offload_flags
from benchmark.server.speed import MEASURED, REHEARSAL, measure_speed
from make_tiny_model import TinyModelSpec, make_tiny_model
from servers.server_process import ends_orderly
from sglang_scout.worker.host_memory import available_bytes

Answer = list[tuple[int, float]]  # tokens and their log-probabilities
Answers = list[Answer]
BUDGET_TOKENS, PAGE, WORKER_CPUS = 128, 32, 4


@dataclass(frozen=True)
class Sizes:
    """Of the checks on a device.

    Attributes:
        batches: requests sent at once, of up to ``context`` tokens; each is answered by ``tokens``.
        start_s, request_s: timeouts for a server to start, including kernel compilation, and to answer one batch.
        error: the largest relative one of a layer; bfloat16 outputs alone are off by 0.4 %.
        logprob_gap: where captured and eager steps choose different tokens, these were so nearly equally likely.
    """

    dtype: str
    head_dim: int
    batches: tuple[int, ...]
    context: int
    tokens: int
    host_gb: float
    start_s: float
    request_s: float
    error: float
    logprob_gap: float


SIZES = {
    "cuda": Sizes("bfloat16", 128, (1, 3, 16), 1500, 24, 2.0, 75.0, 25.0, 1e-2, 0.25),
    "cpu": Sizes("float32", 64, (1, 3), 600, 12, 0.2, 300.0, 600.0, 1e-5, 1e-3),
}


def parting(left: Answer, right: Answer, max_gap: float) -> tuple[int, float] | None:
    """Where two answers first have another token or log-probability, and by how much the latter differs. What follows
    is not comparable."""
    for at, ((token, score), (other, other_score)) in enumerate(zip(left, right, strict=True)):
        gap = abs(score - other_score)
        if token != other or not gap <= max_gap:
            return at, gap
    return None


def token_problems(
    eager: dict[int, Answers], graph: dict[int, Answers], device: str, max_gap: float
) -> tuple[list[str], dict[str, int]]:
    """Problems with the answers of captured steps, by batch size, and how many requests part for which reason.

    Requests that are sent at once need not join the batch in the same steps, so sums round differently, and
    occasionally another page is selected. Then a request parts; wrong steps make nearly all do so at once.
    """
    wrong, ties, apart, together = [], 0, 0, 0
    for size, answers in eager.items():
        for row, (left, right) in enumerate(zip(answers, graph[size], strict=True)):
            where = f"batch {size}, request {row}"
            if len(left) != len(right):
                wrong.append(f"{where}: {len(left)} and {len(right)} tokens")
                continue
            at, gap = parting(left, right, max_gap) or (len(left), 0.0)
            if size > 1 and device != "cpu":  # sums depend on the batch
                together, apart = together + 1, apart + (at <= 1)  # the first is a placeholder
            elif not gap <= max_gap:
                wrong.append(f"{where}, token {at}: log-probabilities differ by {gap:.3g}")
            else:
                ties += at < len(left)
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


def worker_cpus(name: str) -> str | None:
    """CPUs of a server's attention process where both run at once; None: the default."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 4 * WORKER_CPUS:
        return None
    end = len(cpus) - WORKER_CPUS * (name == "eager")
    return ",".join(map(str, cpus[end - WORKER_CPUS : end]))


class Checks:
    """Rows of the checks, and the two servers that they need: one without graphs, one with them."""

    def __init__(self, writer: rows.Writer, device: str, logs: Path, model: Path) -> None:
        self.failed, self._sizes = 0, SIZES[device]
        self._writer, self._device, self._logs, self._model = writer, device, logs, model

    def run(self) -> None:
        sizes = self._sizes
        make_tiny_model(TinyModelSpec(dtype=sizes.dtype, head_dim=sizes.head_dim), self._model)
        with ThreadPoolExecutor(1 if self._device == "cpu" else 2) as pool:
            eager, graph = pool.map(self._serve, ("eager", "graph"))
        if eager and graph:
            wrong, found = token_problems(eager, graph, self._device, sizes.logprob_gap)
            self._row("tokens", wrong, **found)

    def _row(self, name: str, wrong: list[str], **more: Any) -> None:
        self.failed += bool(wrong)
        status, reason = "failed" if wrong else "ok", "; ".join(wrong)[:1000]
        self._writer.add("scout", status, reason, check=name, untimed=True, **more)
        print(f"{name}: {reason or 'ok'} {more or ''}", flush=True)

    def _flags(self, name: str) -> dict[str, Any]:
        sizes, eager, on_cpu = self._sizes, name == "eager", self._device == "cpu"
        most = max(sizes.batches)
        flags = offload_flags(
            self._device,
            budget=BUDGET_TOKENS,
            host_gb=sizes.host_gb,
            recall="fixed",
            resident_tokens=BUDGET_TOKENS * most,
            verify=eager,
        )
        flags |= {"dtype": sizes.dtype, "max_running_requests": most}
        flags["max_total_tokens"] = 2 * most * (sizes.context + sizes.tokens + PAGE)
        if not on_cpu:
            # Not disable_cuda_graph_padding: with it this SGLang looks up graphs by a key that none has.
            flags |= {"cuda_graph_max_bs_decode": most, "mem_fraction_static": 0.5}
            flags |= {"decode_log_interval": 1}  # logs for each step whether a graph ran it
            if cpus := worker_cpus(name):
                flags["kv_offload_cpus"] = cpus
        return flags | ({"disable_cuda_graph": True} if eager else {})

    def _ask(self, server: DecodeServer) -> dict[int, Answers]:
        """Answers per batch size. All requests of one size start together."""
        sizes, answers = self._sizes, {}
        for size in sizes.batches:
            lengths = [sizes.context - 37 * row for row in range(size)]
            prompts = make_prompts(lengths, 500, seed=size)
            answers[size] = server.generate(prompts, sizes.tokens, sizes.request_s)
        return answers

    def _serve(self, name: str) -> dict[int, Answers]:
        """The answers of a server, and rows about its state; no answers if it fails."""
        sizes = self._sizes
        place = self._logs / f"server-{name}", sizes.start_s
        try:
            with DecodeServer(self._model, self._flags(name), *place) as server:
                answers, state = self._ask(server), server.kv_offload()
                log = server.servers["decode"].log()
        except FAILURES as error:
            self._row(f"server-{name}", [f"{type(error).__name__}: {error}"[-1000:]])
            return {}
        wrong = state_problems(state)
        if name == "eager":
            checks, error = state["verify_checks"], state["verify_max_rel_error"]
            if not (checks and 0 < error <= sizes.error):
                wrong.append(f"verify_max_rel_error = {error}, of {checks} checks")
            self._row("verify", wrong, max_rel_error=error, checks=checks)
        else:
            names = ("steps", "cpu_pages", "recalled_pages")
            self._row("state", wrong, **{name: state[name] for name in names})
        if self._device != "cpu":
            wrong = graph_problems(log, name == "graph")
            self._row("graphs", wrong, server=name)
        return answers


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = rows.argument_parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON lines file to append to")
    add("--logs", type=Path, help="folder for the servers' logs; default: the folder of --out")
    add("--device", choices=SIZES, default="cuda")
    add("--speed", action="store_true", help="measure speed instead of the checks")
    add("--rehearse", action="store_true", help="like --speed, but at small sizes")
    add("--model", choices=MODELS, default="qwen3-14b", help="model shape for --speed")
    host_gb = round(0.8 * available_bytes() / 2**30, 1)
    add("--host-gb", type=float, default=host_gb, help="GiB of host pages for --speed")
    parser.set_defaults(**MEASURED)
    options = parser.parse_args(argv)
    if options.rehearse:
        vars(options).update(REHEARSAL)
    if options.speed and options.device == "cpu":
        parser.error("--speed needs --device cuda")
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
            checks = Checks(writer, options.device, logs, Path(scratch) / "model")
            checks.run()
            failed = checks.failed
    writer.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
