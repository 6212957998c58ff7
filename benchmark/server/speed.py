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
import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmark import device, rows
from benchmark.decode.model import SIZES, write_config
from benchmark.mapped import wait_mapped
from benchmark.server.decode_server import FAILURES, DecodeServer, make_prompts, offload_flags
from sglang_scout.core.config import DEFAULT_BUDGET_TOKENS

PAGE = 32
NUM_RESERVED_DECODE_TOKENS = 512
"""SGLang's default of ``--num-reserved-decode-tokens``."""
MAX_REQUESTS = 64
SKIPPED_STEPS = 50
"""At the start of the window, while the cache fills and recall settles."""
START_S, MAPPED_S, RUN_S = 90.0, 45.0, 90.0
"""Timeouts: to start without locking memory, for the attention process to map it, and for the requests of a context."""
LOCK_GB_PER_S = 1.5
"""Slowest rate at which host memory may be locked."""

SERVERS = {
    "stock-flashinfer": {"attention_backend": "flashinfer"},
    # Only where the one before fails, which may compile C++.
    "stock-triton": {"attention_backend": "triton"},
    # As many resident pages as fit in device memory; still only the selected ones are attended to.
    "scout-device": {"cache": "device"},
}
MEASURED = {"servers": list(SERVERS), "contexts": [32768], "new_tokens": 256}
REHEARSAL = {
    "speed": True,
    "model": "few-layers",
    "host_gb": 0.3,
    "contexts": [2048],
    "new_tokens": 128,
}
REHEARSAL["servers"] = ["stock-flashinfer", "scout-device"]
"""Options at small sizes, where other programs use the device too; stock is limited to two requests."""

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
            f"the requests decoded at the same time for {len(together)} steps, {skip + 3} are needed"
        )
    return together[skip], last


def steady(times: list[list[float]], skip: int = SKIPPED_STEPS) -> tuple[list[float], float]:
    """In the window: µs between tokens of the first request, and tokens per second of all."""
    first, last = window(times, skip)
    inside = [t for t in times[0] if first <= t <= last]
    tokens = sum(first < t <= last for row in times for t in row)
    gaps = [max(1e6 * (b - a), 1.0) for a, b in zip(inside, inside[1:], strict=False)]
    return gaps, tokens / (last - first)


def max_requests(model: str, nbytes: float, tokens: int) -> int:
    """Number of requests of ``tokens`` tokens whose bfloat16 KV fits in ``nbytes``, at most ``MAX_REQUESTS``."""
    return max(1, min(MAX_REQUESTS, int(nbytes // (2 * SIZES[model].token_values * tokens))))


@contextlib.contextmanager
def beside(worker_cpus: Collection[int]) -> Iterator[None]:
    """Keeps this thread, and those that it starts in the block, off the CPUs of CPU attention."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before - set(worker_cpus) or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def longest_tokens(options: argparse.Namespace) -> int:
    """Of a request, prompt and answer."""
    return max(options.contexts) + options.new_tokens + 64


def reserved_tokens(options: argparse.Namespace) -> int:
    """Free tokens that SGLang reserves per running request before it admits another one."""
    return max(NUM_RESERVED_DECODE_TOKENS, options.new_tokens) + 64


def flags_of(name: str, options: argparse.Namespace, device_bytes: int) -> dict[str, Any]:
    """Flags of a server."""
    common = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy"}
    common["disable_radix_cache"] = True
    common["context_length"] = longest_tokens(options)
    if options.rehearse:
        common["mem_fraction_static"] = 0.5
    tokens = min(options.contexts) + reserved_tokens(options)
    if "attention_backend" in SERVERS[name]:
        # A decode server never runs a prefill.
        stock = SERVERS[name] | {"page_size": PAGE, "disable_prefill_cuda_graph": True}
        batch = 2 if options.rehearse else max_requests(options.model, device_bytes, tokens)
        return common | stock | {"max_running_requests": batch}
    ours = offload_flags("cuda", budget=DEFAULT_BUDGET_TOKENS, host_gb=options.host_gb)
    batch = max_requests(options.model, options.host_gb * 2**30, tokens)
    return common | ours | {"max_running_requests": batch}


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
        names = ("backend", "plan", "host_pages_total", "resident_slots", "resident_pages")
        fields |= {name: ours.get(name) for name in names}
        fields["worker_cpus"] = ours["worker"]["cpus"]
    return fields


def run_server(
    writer: rows.Writer, server: DecodeServer, about: dict[str, Any], options: argparse.Namespace
) -> None:
    """A row of a server for each context. Raises one of FAILURES."""
    info, impl = server.info(), about["server"].partition("-")[0]
    found = about | about_server(info)
    if state := offload_state(info):
        nbytes = state["host_pages_total"] * PAGE * 2 * SIZES[options.model].token_values
        found["mapped_share"] = wait_mapped(state["worker"]["pid"], nbytes, MAPPED_S)
    for context in options.contexts:
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
            times = server.token_times(prompts, options.new_tokens, RUN_S, look)
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


def wait_free(before_bytes: int, max_s: float = 60.0) -> None:
    """Wait until about as much device memory is free as before: the driver frees it some time after the process is
    gone."""
    end = time.monotonic() + max_s
    while torch.cuda.mem_get_info()[0] < before_bytes - 2**29 and time.monotonic() < end:
        time.sleep(0.5)


def pointless(found: Sequence[rows.Row], options: argparse.Namespace) -> str:
    """Why ours has nothing to gain beside the stock server of these rows; "" if it has, or if there is none."""
    for row in (r for r in found if r["impl"] == "stock" and r["status"] == "ok"):
        tokens = row["context"] + reserved_tokens(options)
        ours = max_requests(options.model, options.host_gb * 2**30, tokens)
        sizes = row["context"], ours, row["batch"], options.host_gb
        if why := device.pointless(*sizes, "stock SGLang on this device"):
            return why
    return ""


def measure_speed(
    writer: rows.Writer, options: argparse.Namespace, logs: Path, folder: Path
) -> int:
    """Rows of all servers; returns the number of unexpected failures."""
    failed, shape = 0, options.model
    model = write_config(SIZES[shape], folder / shape, longest_tokens(options))
    device_bytes = torch.cuda.get_device_properties(0).total_memory
    free_bytes = torch.cuda.mem_get_info()[0]
    for name in options.servers:
        impl = name.partition("-")[0]
        measured = [r["impl"] for r in writer.rows if r["status"] == "ok"]
        if name == "stock-triton" and "stock" in measured:
            continue
        flags = flags_of(name, options, device_bytes)
        about = {"model": shape, "server": name, **SERVERS[name]}
        about["speed_tokens"] = options.new_tokens
        if impl == "scout":
            about |= {"host_gb": options.host_gb, "budget": DEFAULT_BUDGET_TOKENS}
            if why := pointless(writer.rows, options):
                writer.add(impl, "skipped", why, **about)
                print(f"ABORTED: {why}", flush=True)
                return failed + 1
        try:
            max_s = start_s(impl, options.host_gb)
            with DecodeServer(model, flags, logs / f"server-{name}", max_s) as server:
                run_server(writer, server, about, options)
        except FAILURES as error:
            failed += name != "stock-flashinfer"
            writer.add(impl, "failed", str(error)[-1000:], **about)
            print(f"{name}: FAILED: {error}", flush=True)
        if not options.rehearse:  # other programs use the device then
            wait_free(free_bytes)
    return failed
