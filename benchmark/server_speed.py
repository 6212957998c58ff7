"""Decode throughput of ``gpu_server.py``: stock SGLang and ours, dummy weights at the shape of a large model.

Which pages are selected comes from noise (``dummy_kv``, random weights), not from the drift that ``gpu_decode.py``
calibrates to the paper's figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rows
from decode_server import FAILURES, DecodeServer, offload, prompts_of

SHAPES = {"qwen3-8b": (36, 4096, 12288, 32, 8), "qwen3-14b": (40, 5120, 17408, 40, 8)}
"""Layers, hidden, intermediate, query heads, KV heads."""
NUM_RESERVED_DECODE_TOKENS = 512
"""SGLang's default of ``--num-reserved-decode-tokens``."""


def write_config(shape: str, folder: Path, context: int) -> Path:
    """A model folder without weights: what ``--load-format dummy`` needs."""
    layers, hidden, intermediate, heads, kv_heads = SHAPES[shape]
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": layers,
        "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": context, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


SAMPLE_S = 0.5


class WaitSamples:
    """While in a ``with`` block: twice a second, the device's waits so far, from a server's state.

    Attributes:
        samples: seconds (``time.monotonic``), and ``gpu_wait_us`` at that time.
    """

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self.samples: list[tuple[float, int]] = []
        self._state = state
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            try:
                waited_us = self._state()["gpu_wait_us"]
            except (*FAILURES, KeyError):
                continue  # a server that fails is noticed by its requests
            self.samples.append((time.monotonic(), waited_us))

    def __enter__(self) -> WaitSamples:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def share(self, first: float, last: float) -> float | None:
        """Waits as a share of the time between two moments; None where no two samples lie between."""
        inside = [sample for sample in self.samples if first <= sample[0] <= last]
        if len(inside) < 2:
            return None
        (begin, before), (end, after) = inside[0], inside[-1]
        return (after - before) / (1e6 * (end - begin))


def window(times: list[list[float]]) -> tuple[float, float]:
    """When all requests had begun to decode, and when the first of them ended."""
    return max(row[1] for row in times), min(row[-1] for row in times)


def steady(times: list[list[float]]) -> tuple[list[float], float]:
    """Of what :meth:`DecodeServer.token_times` returns: µs between tokens of the first request, and
    tokens per second of all, while all of them decode.

    Raises:
        RuntimeError: they never all did.
    """
    first, last = window(times)
    inside = [t for t in times[0] if first <= t <= last]
    if len(inside) < 3:
        raise RuntimeError("the requests did not decode at the same time; raise --speed-tokens")
    tokens = sum(first < t <= last for row in times for t in row)
    gaps = [max(1e6 * (b - a), 1.0) for a, b in zip(inside, inside[1:], strict=False)]
    return gaps, tokens / (last - first)


def _of_ours(
    state: dict[str, Any], waits: WaitSamples | None, times: list[list[float]]
) -> dict[str, Any]:
    """Fields of a row of our server; of the stock server none."""
    found = {name: state[name] for name in ("cpu_compute_ratio", "fallback_pages") if state}
    if waits is not None and (share := waits.share(*window(times))) is not None:
        found["wait_share"] = round(share, 4)
    return found


def speed(
    writer: rows.Writer, options: argparse.Namespace, logs: Path, folder: Path, end: float
) -> int:
    failed = 0
    room = options.speed_context + options.speed_tokens + 64
    # SGLang admits a request only while so many tokens more are free for each that runs.
    reserve = max(NUM_RESERVED_DECODE_TOKENS, options.speed_tokens) + 64
    for shape in options.model:
        model = write_config(shape, folder / shape, room)
        common = {"dtype": "bfloat16", "load_format": "dummy", "context_length": room,
                  "disable_radix_cache": True}  # fmt: skip
        for impl in ("scout", "stock"):  # what is ours first, should time run out
            about = {"model": shape, "context": options.speed_context}
            if end - time.monotonic() < 60:
                writer.add(impl, "skipped", "no time left", **about)
                continue
            if impl == "stock":
                more = {"attention_backend": "triton", "page_size": 32, "max_running_requests": 64}
            else:
                # As the paper: the selected pages alone, however many more are resident.
                config = {"attend": "selected"}
                more = offload(options, budget=options.budget, host_gb=options.host_gb, **config)
                more["max_running_requests"] = 64
            try:
                with DecodeServer(
                    model, common | more, device=options.device, log=logs / f"server-{impl}-{shape}.log",
                    ready_timeout_s=end - time.monotonic(),
                ) as server:  # fmt: skip
                    tokens = server.info()["max_total_num_tokens"]
                    batch = min(64, tokens // (options.speed_context + reserve))
                    if batch < 1:
                        writer.add(
                            impl, "skipped", f"not one request fits {tokens} tokens", **about
                        )
                        continue
                    prompts = prompts_of([options.speed_context] * batch, 100_000, seed=1)
                    limit_s = max(10.0, end - time.monotonic())
                    waits = WaitSamples(server.kv_offload) if impl == "scout" else None
                    with waits or contextlib.nullcontext():
                        times = server.token_times(prompts, options.speed_tokens, limit_s)
                    gaps, rate = steady(times)
                    state = server.kv_offload() if impl == "scout" else {}
                    # Before it is stopped: a server that is slow to go must not take its figures with it.
                    found = _of_ours(state, waits, times)
                    summary = rows.summary(gaps)
                    writer.add(
                        impl, **about, batch=batch, tokens_per_s=round(rate, 1), **found, **summary
                    )
                    print(f"{impl} {about} batch {batch}: {rate:.1f} tokens/s {found}", flush=True)
            except FAILURES as error:
                failed += 1
                writer.add(impl, "failed", str(error)[-1000:], **about)
                print(f"{impl} {about}: FAILED: {error}", flush=True)
    return failed
