"""Decode throughput of stock SGLang and ours: dummy weights at the shape of a large model, requests of one length.

Stock runs first, with the largest batch that fits in device memory, then ours, with the largest that fits in host
memory; nothing is measured where that is no larger. Each server is measured at every context, a row each. samples_us
are the inter-token times of one request while all of them decode, without the first 50 steps. cpu_compute_ratio,
fallback_pages and wait_share (the device waiting for CPU attention) are over the same time. Page selection is driven by
noise (``dummy_kv``, random weights), not by the drift that gpu_decode.py calibrates to the paper's figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmark import nvidia_smi, rows
from benchmark.mapped import wait_mapped
from benchmark.server.decode_server import FAILURES, DecodeServer, make_prompts, offload_flags

SHAPES = {"qwen3-8b": (36, 4096, 12288, 32, 8), "qwen3-14b": (40, 5120, 17408, 40, 8)}
"""Layers, hidden, intermediate, query heads, KV heads."""
FEW_LAYERS = {"few-layers": (4, *SHAPES["qwen3-14b"][1:])}
HEAD_DIM, PAGE = 128, 32
NUM_RESERVED_DECODE_TOKENS = 512
"""SGLang's default of ``--num-reserved-decode-tokens``."""
MOST_REQUESTS = 64
SKIPPED_STEPS = 50
"""At the start of the window, while the cache fills and recall settles."""
START_S, MAPPED_S, RUN_S = 90.0, 45.0, 90.0
"""Timeouts: to start without locking memory, for the attention process to map it, and for the requests of a context."""
LOCK_GB_PER_S = 1.5
"""Slowest rate at which host memory may be locked."""

SERVERS = {
    "stock-flashinfer": {"attention_backend": "flashinfer"},
    "stock-triton": {
        "attention_backend": "triton"
    },  # only where the one before fails, which may compile C++
    # As many resident pages as fit in device memory; still only the selected ones are attended to.
    "scout-device": {"cache": "device"},
}
REHEARSAL = {
    "speed": True, "model": "few-layers", "host_gb": 0.3, "speed_context": [2048], "speed_tokens": 128,
    "servers": ["stock-flashinfer", "scout-device"],
}  # fmt: skip
"""Options at small sizes, where other programs use the device too; stock is limited to two requests."""


def write_config(shape: str, folder: Path, context: int) -> Path:
    """A model folder without weights, as needed by ``--load-format dummy``."""
    layers, hidden, intermediate, heads, kv_heads = (SHAPES | FEW_LAYERS)[shape]
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


State = tuple[float, dict[str, Any]]
"""``time.monotonic()`` and a server's counters; those of a stock server are empty."""


def of_window(states: Sequence[State], first: float, last: float) -> dict[str, Any]:
    """Fields of a row about a time interval; none if it contains fewer than two states of our server."""
    inside = [s for s in states if first <= s[0] <= last and "steps" in s[1]]
    if len(inside) < 2:
        return {}
    (begin, before), (end, after) = inside[0], inside[-1]
    names = ("gpu_wait_us", "cpu_pages", "budget_pages", "fallback_pages")
    more = {name: after[name] - before[name] for name in names}
    budget = more["budget_pages"]
    return {
        "wait_share": round(more["gpu_wait_us"] / (1e6 * (end - begin)), 4),
        "cpu_compute_ratio": round(more["cpu_pages"] / budget, 4) if budget else None,
        "fallback_pages": more["fallback_pages"],
        "resident_pages": after["resident_pages"],
    }


def window(times: list[list[float]], skip: int) -> tuple[float, float]:
    """From when all requests had begun to decode and ``skip`` steps had passed until the first of them finished.

    Raises:
        RuntimeError: they did not decode concurrently for that long.
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
    """In the window: µs between tokens of the first request, and tokens per second of all."""
    first, last = window(times, skip)
    inside = [t for t in times[0] if first <= t <= last]
    tokens = sum(first < t <= last for row in times for t in row)
    gaps = [max(1e6 * (b - a), 1.0) for a, b in zip(inside, inside[1:], strict=False)]
    return gaps, tokens / (last - first)


def token_bytes(shape: str) -> int:
    """Bytes of keys and values of a token in all layers, in bfloat16."""
    layers, _, _, _, kv_heads = (SHAPES | FEW_LAYERS)[shape]
    return 2 * layers * kv_heads * HEAD_DIM * 2


def most_requests(shape: str, nbytes: float, tokens: int) -> int:
    """Number of requests of ``tokens`` tokens that fit in ``nbytes``, at most ``MOST_REQUESTS``."""
    return max(1, min(MOST_REQUESTS, int(nbytes // (token_bytes(shape) * tokens))))


@contextlib.contextmanager
def beside(worker_cpus: Collection[int]) -> Iterator[None]:
    """Keeps this thread, and those that it starts in the block, off the CPUs of CPU attention."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before - set(worker_cpus) or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def reserved_tokens(options: argparse.Namespace) -> int:
    """Free tokens that SGLang reserves per running request before it admits another one."""
    return max(NUM_RESERVED_DECODE_TOKENS, options.speed_tokens) + 64


def flags_of(name: str, options: argparse.Namespace, device_bytes: int) -> dict[str, Any]:
    """Flags of a server."""
    room = max(options.speed_context) + options.speed_tokens + 64
    common = {"dtype": "bfloat16", "load_format": "dummy", "context_length": room,
              "disable_radix_cache": True}  # fmt: skip
    if options.rehearse:
        common["mem_fraction_static"] = 0.5
    about, tokens = SERVERS[name], min(options.speed_context) + reserved_tokens(options)
    if "attention_backend" in about:
        batch = 2 if options.rehearse else most_requests(options.model, device_bytes, tokens)
        # A decode server never runs a prefill.
        stock = {
            "page_size": PAGE,
            "max_running_requests": batch,
            "disable_prefill_cuda_graph": True,
        }
        return common | about | stock
    batch = most_requests(options.model, options.host_gb * 2**30, tokens)
    flags = offload_flags("cuda", budget=options.budget, host_gb=options.host_gb)
    flags["max_running_requests"] = batch
    return common | flags


def offload_state(info: dict[str, Any]) -> dict[str, Any]:
    """The offload state in a ``/server_info``; empty for a stock server, which has our flag's value there."""
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
    }
    if ours := offload_state(info):
        names = ("backend", "ops", "plan", "host_pages_total", "resident_slots", "resident_pages")
        fields |= {name: ours.get(name) for name in names}
        fields["worker_cpus"] = ours["worker"]["cpus"]
    return fields


def run_server(
    writer: rows.Writer, impl: str, server: DecodeServer, about: dict[str, Any],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    """A row of a server for each context. Raises one of FAILURES."""
    info = server.info()
    found = about | about_server(info)
    if state := offload_state(info):
        nbytes = state["host_pages_total"] * PAGE * token_bytes(options.model)
        found["mapped_share"] = wait_mapped(state["worker"]["pid"], nbytes, MAPPED_S)
    for context in options.speed_context:
        room = context + reserved_tokens(options)
        batch = min(found["max_running_requests"], found["token_capacity"] // room)
        row = {**found, "context": context, "batch": batch}
        if batch < 1:
            reason = f"not one request fits {found['token_capacity']} tokens"
            writer.add(impl, "skipped", reason, **row)
            continue
        prompts = make_prompts([context] * batch, 100_000, seed=1)
        states: list[State] = []

        def look(states: list[State] = states) -> None:
            with contextlib.suppress(*FAILURES, KeyError):  # a failing server fails its requests
                states.append((time.monotonic(), offload_state(server.info())))

        with beside(found.get("worker_cpus", ())):
            times = server.token_times(prompts, options.speed_tokens, RUN_S, look)
        gaps, rate = steady(times)
        row |= {"tokens_per_s": round(rate, 1)} | of_window(states, *window(times, SKIPPED_STEPS))
        writer.add(impl, **row, **rows.summary(gaps))
        shown = ("cpu_compute_ratio", "wait_share", "fallback_pages")
        print(
            f"{about['server']}: context {context}, batch {batch}: {row['tokens_per_s']} tokens/s "
            + " ".join(f"{x}={row[x]}" for x in shown if x in row),
            flush=True,
        )


def start_s(impl: str, host_gb: float) -> float:
    """Timeout for a server to start."""
    return START_S + (host_gb / LOCK_GB_PER_S if impl == "scout" else 0.0)


def pointless(found: Sequence[rows.Row], options: argparse.Namespace) -> str:
    """Why ours has nothing to gain beside the stock server of these rows; "" if it has, or if there is none."""
    for row in (r for r in found if r["impl"] == "stock" and r["status"] == "ok"):
        tokens = row["context"] + reserved_tokens(options)
        ours = most_requests(options.model, options.host_gb * 2**30, tokens)
        if ours <= row["batch"]:
            return (
                f"stock SGLang holds {row['batch']} requests of {row['context']} tokens on this device, and "
                f"{options.host_gb:.0f} GiB of host pages hold {ours}: co-attention has nothing to gain; raise "
                "--host-gb, or take a device with less memory"
            )
    return ""


def measure_speed(
    writer: rows.Writer, options: argparse.Namespace, logs: Path, folder: Path
) -> int:
    """Rows of all servers; returns the number of unexpected failures."""
    failed, shape = 0, options.model
    room = max(options.speed_context) + options.speed_tokens + 64
    model = write_config(shape, folder / shape, room)
    device_bytes = torch.cuda.get_device_properties(0).total_memory
    free_mib = nvidia_smi.used_mib()
    for name in options.servers:
        impl = name.partition("-")[0]
        measured = [r["impl"] for r in writer.rows if r["status"] == "ok"]
        if name == "stock-triton" and "stock" in measured:
            continue
        flags = flags_of(name, options, device_bytes)
        about = {"model": shape, "server": name, **SERVERS[name]}
        about |= {"speed_tokens": options.speed_tokens}
        if impl == "scout":
            about |= {"host_gb": options.host_gb, "budget": options.budget}
            if why := pointless(writer.rows, options):
                writer.add(impl, "skipped", why, **about)
                print(f"ABORTED: {why}", flush=True)
                return failed + 1
        try:
            log = logs / f"server-{name}.log"
            with DecodeServer(
                model, flags, device="cuda", log=log,
                ready_timeout_s=start_s(impl, options.host_gb),
            ) as server:  # fmt: skip
                run_server(writer, impl, server, about, options)
        except FAILURES as error:
            failed += name != "stock-flashinfer"
            writer.add(impl, "failed", str(error)[-1000:], **about)
            print(f"{name}: FAILED: {error}", flush=True)
        if not options.rehearse:  # other programs use the device then
            nvidia_smi.wait_free(free_mib)
    return failed
