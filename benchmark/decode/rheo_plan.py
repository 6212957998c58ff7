"""RheoServe's look-up share and longest context, by the sizes of `sglang-scout plan` and its step model's rates.

    python -m benchmark.decode.rheo_plan --out docs/results/rheo_plan.jsonl

Nothing is measured. The step model has no `rheo`, whose CPU attention begins with the layer's own query. Here its terms
are put together anew: there is no second W_q, and a layer waits for what CPU attention takes longer than the device's.
Rows (format: rows.py, untimed), Qwen3-8B with pilots of rank 32, per device, context and requests: `share` of the
scores, with the projection of queries, in a step of `us`, parts in `parts_us`; and, with context 0, the longest context
of so many requests, `stock_tokens` and `rheo_tokens`, and `by_host`, whether HOST_GIB of pages limit the latter.
"""

from __future__ import annotations

import bisect
import itertools
import sys
import tempfile
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np

from benchmark import rows
from benchmark.decode.model import SIZES, write_config
from sglang_scout.cli.sizes import GIB, ModelConfig, Server, read_model, server_config
from sglang_scout.cli.step_model import DEVICES, MISSING_SHARE, Device, offload_step
from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.forecast import VERSION, Header, PageWeights, save_weights
from sglang_scout.core.profile import ModelIdentity

MODEL, RANK, MOST_TOKENS = "qwen3-8b", 32, 1 << 22
GPUS, CONTEXTS, REQUESTS = ("a100", "h100"), (32768, 65536, 131072), (1, 4, 16)
MEMORY_SHARE, HOST_GIB = 0.88, 256


def pilots(folder: Path) -> str:
    """A file of zeros: only its sizes count."""
    of = SIZES[MODEL]
    identity = ModelIdentity("qwen3", of.layers, of.q_heads, of.kv_heads, of.head_dim, "")
    shape, group = (of.layers, of.kv_heads, RANK), of.q_heads // of.kv_heads
    columns = {"w_k": 2 * of.head_dim, "w_q": group * of.head_dim}
    arrays = {name: np.zeros((*shape, n), np.float32) for name, n in columns.items()}
    path = str(folder / "pilot.npz")
    save_weights(PageWeights(Header(VERSION, "pilot", identity), arrays, path), path)
    return path


def parts_us(server: Server, device: Device, requests: int) -> dict[str, float]:
    parts = offload_step(server, device, requests).parts_us
    weights = server.policy.rule.weights
    assert weights is not None
    del parts["look-ahead"]
    parts["scores"] += device.us("scores", device.memory_gb_s, weights.arrays["w_q"].nbytes)
    kv_bytes = requests * server.budget_tokens * server.kv_bytes_per_token
    worker = device.us("worker", device.host_gb_s, MISSING_SHARE * kv_bytes)
    parts["wait"] = max(0.0, worker - parts["attention"])
    return parts


def longest(model: ModelConfig, config: OffloadConfig, device: Device, requests: int) -> rows.Row:
    """Most tokens of a request on a device, of as many requests; multiples of 1,024."""
    room = int(device.memory_bytes * MEMORY_SHARE) - model.weight_bytes

    def needed(name: str, thousands: int) -> int:
        server = Server(model, config, 1024 * thousands)
        kv_bytes = requests * server.kv_bytes_per_request
        return kv_bytes if name == "stock" else server.memory(requests).device_bytes

    counts = range(1, MOST_TOKENS // 1024)
    stock, rheo = (
        1024 * bisect.bisect_right(counts, room, key=partial(needed, name))
        for name in ("stock", "rheo")
    )
    of_token = Server(model, config, 1024).kv_bytes_per_token
    by_host = HOST_GIB * GIB // (requests * of_token) // 1024 * 1024
    return {"stock_tokens": stock, "rheo_tokens": min(rheo, by_host), "by_host": by_host < rheo}


def table(found: list[rows.Row]) -> str:
    """Look-up's share by context, and the longest context."""
    lines = []
    for (gpu, requests), same in itertools.groupby(found, itemgetter("impl", "requests")):
        *shares, most = same
        stock, rheo = most["stock_tokens"], most["rheo_tokens"]
        cells = [f"{row['share']:.1%}" for row in shares]
        lines.append([gpu, str(requests), *cells, f"{stock:,}", f"{rheo:,}", f"{rheo / stock:.1f}"])
    head = ["device", "requests", *(f"{n:,}" for n in CONTEXTS)]
    return rows.markdown_table([*head, "longest, stock", "longest, `rheo`", "times"], lines)


def main() -> int:
    parser = rows.argument_parser(__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines")
    options = parser.parse_args()
    writer = rows.Writer(options.out, rows.environment("rheo_plan", ("sglang-scout",)))
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_config(SIZES[MODEL], Path(scratch) / MODEL, MOST_TOKENS)
        pilot = pilots(Path(scratch))
        model = read_model(str(folder), "auto")
        config = server_config("rheo", f'{{"pilot_file": "{pilot}"}}')
        for gpu in GPUS:
            for requests in REQUESTS:
                about = {"untimed": True, "model": MODEL, "rank": RANK, "requests": requests}
                about["budget"] = config.budget_tokens
                for context in CONTEXTS:
                    parts = parts_us(Server(model, config, context), DEVICES[gpu], requests)
                    us = sum(parts.values())
                    found = {"us": us, "share": parts["scores"] / us, "parts_us": parts}
                    writer.add(gpu, **about, context=context, **found)
                most = longest(model, config, DEVICES[gpu], requests)
                writer.add(gpu, **about, context=0, **most)
    writer.close()
    print(table(writer.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
