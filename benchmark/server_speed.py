"""Decode throughput of ``gpu_server.py``: stock SGLang and ours, dummy weights at the shape of a large model.

Which pages are selected comes from noise (``dummy_kv``, random weights), not from the drift that ``gpu_decode.py``
calibrates to the paper's figures.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nvidia_smi
import rows
from checks_in_time import OutOfTime, TimeLimit
from decode_server import FAILURES, DecodeServer, offload, prompts_of
from mapped import wait_mapped
from sglang_scout.worker.cpus import core_of, reserve_server_cores

SHAPES = {"qwen3-8b": (36, 4096, 12288, 32, 8), "qwen3-14b": (40, 5120, 17408, 40, 8)}
"""Layers, hidden, intermediate, query heads, KV heads."""
HEAD_DIM, PAGE = 128, 32
NUM_RESERVED_DECODE_TOKENS = 512
"""SGLang's default of ``--num-reserved-decode-tokens``."""
MOST_REQUESTS = 64
SKIPPED_STEPS = 50
"""Of the window, at its begin: the cache fills, and the recall finds its pace."""
RUNS = 2
"""Of the same server."""
SHARE_OF_OURS, LEAST_OF_STOCK_S = 0.57, 150.0
"""While a stock server is to come ours get no more of the time than this share, and leave so much."""
LEAST_S = 60.0
"""With less time left a server is not started."""
LEAST_CPUS = 8
"""From so many on the client has a core of its own, beside those that the worker leaves to the server."""
MAPPED_S = 45.0
"""The longest to wait until the worker has mapped the arena."""
DEVICE_FREE_S = 60.0


class Side(NamedTuple):
    """A server to measure.

    Attributes:
        impl: "scout" or "stock".
        about: what tells its rows from those of other sides.
    """

    impl: str
    about: dict[str, Any]


SIDES = {
    # As the paper: as many pages resident as all requests select, and what is not is computed by the CPU.
    "scout-budget": Side("scout", {"cache": "budget"}),
    "stock-triton": Side("stock", {"attention_backend": "triton"}),
    "stock-flashinfer": Side("stock", {"attention_backend": "flashinfer"}),
    # All pages that the device's memory holds; still only the selected ones are attended to.
    "scout-device": Side("scout", {"cache": "device"}),
}


def write_config(shape: str, folder: Path, context: int) -> Path:
    """A model folder without weights: what ``--load-format dummy`` needs."""
    layers, hidden, intermediate, heads, kv_heads = SHAPES[shape]
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": layers,
        "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM, "vocab_size": 151936,
        "max_position_embeddings": context, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# What a window of time says -------------------------------------------------------------------------

SAMPLE_S = 0.5


class Samples:
    """While in a ``with`` block: twice a second, a server's counters so far. A stock server has none, and is asked
    all the same, as asking takes its time.

    Attributes:
        samples: seconds (``time.monotonic``), and the state at that time.
    """

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self.samples: list[tuple[float, dict[str, Any]]] = []
        self._state = state
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            try:
                state = self._state()
            except (*FAILURES, KeyError):
                continue  # a server that fails is noticed by its requests
            self.samples.append((time.monotonic(), state))

    def __enter__(self) -> Samples:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def of_window(self, first: float, last: float) -> dict[str, Any]:
        """Fields of a row about the time between two moments; none where no two samples of ours lie between."""
        inside = [
            sample for sample in self.samples if first <= sample[0] <= last and "steps" in sample[1]
        ]
        if len(inside) < 2:
            return {}
        (begin, before), (end, after) = inside[0], inside[-1]

        def more(name: str) -> int:
            return int(after[name] - before[name])

        budget = more("budget_pages")
        return {
            "wait_share": round(more("gpu_wait_us") / (1e6 * (end - begin)), 4),
            "cpu_compute_ratio": round(more("cpu_pages") / budget, 4) if budget else None,
            "fallback_pages": more("fallback_pages"),
            "resident_pages": after["resident_pages"],
        }


def window(times: list[list[float]], skip: int) -> tuple[float, float]:
    """When all requests had begun to decode and ``skip`` steps had passed, and when the first of them ended.

    Raises:
        RuntimeError: they did not decode together for so long.
    """
    begun, last = max(row[1] for row in times), min(row[-1] for row in times)
    together = [t for t in times[0] if begun <= t <= last]
    if len(together) < skip + 3:
        raise RuntimeError(
            f"the requests decoded at the same time for {len(together)} steps, {skip + 3} are needed; "
            "raise --speed-tokens"
        )
    return together[skip], last


def steady(times: list[list[float]], skip: int = SKIPPED_STEPS) -> tuple[list[float], float]:
    """Of what :meth:`DecodeServer.token_times` returns: µs between tokens of the first request, and
    tokens per second of all, in the window.

    Raises:
        RuntimeError: there is no window.
    """
    first, last = window(times, skip)
    inside = [t for t in times[0] if first <= t <= last]
    tokens = sum(first < t <= last for row in times for t in row)
    gaps = [max(1e6 * (b - a), 1.0) for a, b in zip(inside, inside[1:], strict=False)]
    return gaps, tokens / (last - first)


# The servers ----------------------------------------------------------------------------------------


def token_bytes(shape: str) -> int:
    """Of keys and values of all layers, in bfloat16."""
    layers, _, _, _, kv_heads = SHAPES[shape]
    return 2 * layers * kv_heads * HEAD_DIM * 2


def most_requests(shape: str, nbytes: float, tokens: int) -> int:
    """Requests of so many tokens that so much memory holds, at most ``MOST_REQUESTS``."""
    return max(1, min(MOST_REQUESTS, int(nbytes // (token_bytes(shape) * tokens))))


def cpus_of(
    available: Collection[int], core_of: Callable[[int], int] = core_of
) -> tuple[list[int], set[int]]:
    """CPUs of the worker and of the client, whole cores, so that neither client nor server takes the worker's; none
    and all where there are too few to divide."""
    if len(available) < LEAST_CPUS:
        return [], set(available)
    worker = reserve_server_cores(available, core_of)
    client = {cpu for cpu in worker if core_of(cpu) == core_of(worker[-1])}
    return [cpu for cpu in worker if cpu not in client], client


@contextlib.contextmanager
def on_cpus(cpus: Collection[int]) -> Iterator[None]:
    """This thread and those that it starts meanwhile run there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def flags_of(
    side: Side, shape: str, options: argparse.Namespace, tokens: int, device_bytes: int
) -> dict[str, Any]:
    """Flags of a side's server; ``tokens`` is what SGLang wants to have free for a request."""
    if side.impl == "stock":
        return {
            "attention_backend": side.about["attention_backend"],
            "page_size": 32,
            "max_running_requests": most_requests(shape, device_bytes, tokens),
            # A decode server never runs a prefill.
            "disable_prefill_cuda_graph": True,
        }
    batch = most_requests(shape, options.host_gb * 2**30, tokens)
    # As the paper: the selected pages alone, however many more are resident.
    config: dict[str, Any] = {"attend": "selected"}
    if side.about["cache"] == "budget":
        config["resident_tokens"] = options.budget * batch
    flags = offload(options, budget=options.budget, host_gb=options.host_gb, **config)
    flags["max_running_requests"] = batch
    if worker := cpus_of(os.sched_getaffinity(0))[0]:
        flags["kv_offload_cpus"] = ",".join(map(str, worker))
    return flags


def absent_reason(side: Side) -> str:
    """Why a side cannot be had here, "" if it can."""
    wanted = side.about.get("attention_backend")
    if wanted == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    return ""


def offload_state(info: dict[str, Any]) -> dict[str, Any]:
    """Of a ``/server_info``; empty for a stock server, which has our flag's value there."""
    state = info["internal_states"][0].get("kv_offload")
    return state if isinstance(state, dict) else {}


def about_server(info: dict[str, Any]) -> dict[str, Any]:
    """Fields of a row about a server, from its ``/server_info``."""
    state = info["internal_states"][0]

    def found(*names: str) -> Any:
        values = (source.get(name) for name in names for source in (state, info))
        return next((value for value in values if value is not None), None)

    fields = {
        "attention_backend": found("decode_attention_backend", "attention_backend"),
        "token_capacity": info["max_total_num_tokens"],
        "mem_fraction_static": found("mem_fraction_static"),
        "max_running_requests": found("max_running_requests"),
        "cuda_graphs": found("cuda_graph_config"),
        "memory_usage_gb": state.get("memory_usage"),
    }
    if ours := offload_state(info):
        names = ("backend", "ops", "plan", "host_pages_total", "resident_slots", "resident_pages")
        fields |= {name: ours.get(name) for name in names}
        fields["worker_cpus"] = ours["worker"]["cpus"]
    return fields


def deadline(sides: Sequence[Side], at: int, begin: float, end: float) -> float:
    """When the side at ``at`` has to end: ours early enough for the stock servers behind it."""
    stock_follows = any(side.impl == "stock" for side in sides[at:])
    if sides[at].impl == "stock" or not stock_follows:
        return end
    return min(begin + SHARE_OF_OURS * (end - begin), end - LEAST_OF_STOCK_S)


def run_server(
    writer: rows.Writer, side: Side, model: Path, flags: dict[str, Any], about: dict[str, Any],
    options: argparse.Namespace, log: Path, limit: TimeLimit,
) -> None:  # fmt: skip
    """Start a server and measure it ``RUNS`` times, a row each.

    Raises:
        one of FAILURES, OutOfTime.
    """
    limit.needs(LEAST_S)
    begin = time.monotonic()
    with DecodeServer(
        model, flags, device=options.device, log=log, ready_timeout_s=limit.left_s()
    ) as server:
        ready_s = time.monotonic() - begin
        info = server.info(limit.left_s(60.0))
        found = about_server(info) | {"ready_s": round(ready_s, 1)}
        tokens = found["token_capacity"]
        reserve = reserved_tokens(options)
        batch = min(found["max_running_requests"], tokens // (options.speed_context + reserve))
        if batch < 1:
            writer.add(
                side.impl, "skipped", f"not one request fits {tokens} tokens", **about, **found
            )
            return
        state = offload_state(info)
        if state and options.device == "cuda":  # elsewhere it is mapped as it is needed
            nbytes = state["host_pages_total"] * PAGE * token_bytes(about["model"])
            most_s = limit.left_s(MAPPED_S)
            found["mapped_share"] = wait_mapped(state["worker"]["pid"], nbytes, most_s)
        prompts = prompts_of([options.speed_context] * batch, 100_000, seed=1)
        _, client = cpus_of(os.sched_getaffinity(0))
        rates: list[float] = []
        for run in range(1, RUNS + 1):
            before = time.monotonic()
            try:
                with (
                    on_cpus(client),
                    Samples(lambda: offload_state(server.info())) as samples,
                ):
                    times = server.token_times(prompts, options.speed_tokens, limit.left_s())
                gaps, rate = steady(times)
                took_s = time.monotonic() - before
                rates.append(rate)
                row = {**about, **found, "batch": batch, "tokens_per_s": round(rate, 1), "run": run}
                row |= samples.of_window(*window(times, SKIPPED_STEPS))
                if run > 1:
                    row["run_to_run"] = round((max(rates) - min(rates)) * run / sum(rates), 4)
                # Each as soon as it is there: a server that is slow to go must not take its figures with it.
                writer.add(side.impl, **row, **rows.summary(gaps))
                print(said(side, row), flush=True)
                if run < RUNS:
                    limit.needs(1.2 * took_s)
            except OutOfTime as error:
                if not rates:
                    raise
                print(f"{side.impl}: measured {len(rates)} of {RUNS} times: {error}", flush=True)
                return


def said(side: Side, row: dict[str, Any]) -> str:
    name = f"{side.impl} with {row['attention_backend']} attention"
    if "cache" in row:
        name += f", {row['resident_pages']} pages resident ({row['cache']})"
    more = ("cpu_compute_ratio", "wait_share", "fallback_pages", "run_to_run", "ready_s")
    return (
        f"{name}: {row['model']}, context {row['context']}, batch {row['batch']}, run {row['run']}: "
        f"{row['tokens_per_s']} tokens/s " + " ".join(f"{x}={row[x]}" for x in more if x in row)
    )


def reserved_tokens(options: argparse.Namespace) -> int:
    """SGLang admits a request only while so many tokens more are free for each that runs."""
    return max(NUM_RESERVED_DECODE_TOKENS, options.speed_tokens) + 64


def speed(
    writer: rows.Writer, options: argparse.Namespace, logs: Path, folder: Path, end: float,
    device_bytes: int,
) -> int:  # fmt: skip
    """Rows of all sides; returns how many failed that should not have."""
    failed = 0
    room = options.speed_context + options.speed_tokens + 64
    names = options.sides
    sides = [SIDES[name] for name in names]
    free_mib = nvidia_smi.used_mib()
    for left, shape in zip(range(len(options.model), 0, -1), options.model, strict=True):
        begin = time.monotonic()
        end_of_model = begin + (end - begin) / left
        model = write_config(shape, folder / shape, room)
        common = {"dtype": "bfloat16", "load_format": "dummy", "context_length": room,
                  "disable_radix_cache": True}  # fmt: skip
        for at, (name, side) in enumerate(zip(names, sides, strict=True)):
            about = {"model": shape, "context": options.speed_context, "side": name, **side.about}
            about["speed_tokens"] = options.speed_tokens
            tokens = options.speed_context + reserved_tokens(options)
            flags = flags_of(side, shape, options, tokens, device_bytes)
            if side.impl == "scout":
                about |= {"host_gb": options.host_gb, "budget": options.budget}
                config = json.loads(flags["kv_offload_config"])
                about["resident_tokens"] = config.get("resident_tokens")
            if reason := absent_reason(side):
                writer.add(side.impl, "absent", reason, **about)
                continue
            limit = TimeLimit(deadline(sides, at, begin, end_of_model))
            log = logs / f"server-{name}-{shape}.log"
            try:
                try:
                    run_server(writer, side, model, common | flags, about, options, log, limit)
                except FAILURES as error:
                    limit.blame(error)
                    # FlashInfer is compiled when the server starts, which not every machine can do.
                    failed += name != "stock-flashinfer"
                    writer.add(side.impl, "failed", str(error)[-1000:], **about)
                    print(f"{name} {shape}: FAILED: {error}", flush=True)
            except OutOfTime as error:
                writer.add(side.impl, "skipped", str(error), **about)
                print(f"{name} {shape}: NOT MEASURED: {error}", flush=True)
            if not nvidia_smi.wait_free(
                free_mib, min(DEVICE_FREE_S, max(0.0, end - time.monotonic()))
            ):
                print(f"{name} {shape}: memory of the device is still taken", flush=True)
    return failed
