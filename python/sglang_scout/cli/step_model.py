"""A model of one decode step: its time from bytes, launches and bandwidths, for stock SGLang and with offload, as the
sum of :data:`TERMS`.

SGLang's work around the layers (scheduling, sampling, output) is in neither.

Predictions are a pair. The high end is these terms at 80 % of published rates. The low end, `low_end`, adds what makes
the model reproduce the ScoutAttention paper's own measurements on the paper's hardware; stock is the same in both.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_scout.core.errors import ConfigError

if TYPE_CHECKING:
    from sglang_scout.cli.sizes import ModelConfig, Plan, Server
    from sglang_scout.engine.policy import Policy

TERMS = {
    "weights": "reading the weights, or computing with them if that takes longer; of experts those that are used",
    "look-ahead": "predicting the next layer's queries: W_q of every layer a second time",
    "scores": "reading the digests of all pages, to select pages",
    "attention": "on the GPU: reading the budget's resident pages; stock reads all KV",
    "launches": "starting kernels; those of layer-ahead selection run beside the model and are not counted",
    "ring": "queries to the CPU, its results and the new token's KV back, over the link",
    "unexplained": "what the paper's servers took beyond all this, in the low end",
    "wait": "for CPU attention, if its missing pages take longer than the GPU's layer before",
    "copies": "recalled pages, over the link; in parallel: the step takes no less",
    "boundary": "the host's work between two steps; in parallel: the step takes no less",
}

LAUNCHES = {"stock": 12, "offload": 14, "ahead": 5, "dense": 12}
"""Kernel launches per layer: eleven of ours (docs/gpu-design.md), six on a side stream, or three in dense steps,
replace stock's for positions, append and attention. The CPU device has five instead of six: no query's digits."""
RING_VALUE_BYTES = 2 + 2  # per query value and per result value, of a bfloat16 model
CAVEAT = (
    "Predicted, not measured: the model has not been calibrated on a GPU. For the ScoutAttention paper's hardware its "
    "high end gives 10.6 times stock where the paper measured 5.1; its low end is fitted to that."
)
"""Beside every prediction."""
MISSING_SHARE = 0.066  # of the budget: the default on SmolLM2, with a cache of the budget (docs/results/recall.md)
RECALLED_SHARE = 0.016  # of the budget that a step recalls, there


@dataclass(frozen=True)
class Device:
    """Bandwidths of a device and of its host."""

    memory_gb_s: float
    flop_s: float  # of dense bfloat16
    link_gb_s: float  # to the host, one direction
    host_gb_s: float  # of host memory for one server's CPU attention
    memory_bytes: float
    launch_us: float = 2.0  # of a kernel in a graph, including ramp-up
    boundary_us: tuple[float, float] = (2200.0, 83.0)  # once, and for each request
    unexplained_us: float = 0.0  # of a layer with a share on the CPU, which no term accounts for
    in_order: bool = False  # layer-ahead selection runs in order, as on the CPU device
    note: str = ""  # for who plans with it
    # Share of a published rate that a part of the step reaches; "": of all others.
    reached: Mapping[str, float] = field(default_factory=lambda: {"": 0.8})

    def us(self, part: str, gb_s: float, nbytes: float) -> float:
        return nbytes / (gb_s * 1e3 * self.reached.get(part, self.reached[""]))

    def boundary(self, batch: int) -> float:
        return self.boundary_us[0] + self.boundary_us[1] * batch


DEVICES = {
    # Host memory: one server's share of a socket with four GPUs, as in NVIDIA's DGX systems.
    "a100": Device(2039, 312e12, 32, 204.8 / 4, 84e9),  # 80GB SXM; EPYC 7742, DDR4-3200
    "h100": Device(3350, 989e12, 64, 307.2 / 4, 84e9),  # SXM; Xeon 8480C, DDR5-4800
    "h200": Device(4800, 989e12, 64, 307.2 / 4, 149e9),  # SXM; Xeon 8480C, DDR5-4800
    "b200": Device(8000, 2250e12, 64, 358.4 / 4, 190e9),  # HGX; Xeon 8570, DDR5-5600
    "l40s": Device(864, 362e12, 32, 307.2 / 4, 47.6e9),  # PCIe 4; a host as the H100's
    # Workstations: two GPUs share 8 channels of DDR5-4800. FLOP/s from the data sheets' 1,457 TFLOP/s of sparse FP8
    # (Ada) and 4,000 of sparse FP4 (Blackwell, Workstation Edition; the Server Edition has 1,597 GB/s).
    "rtx-6000-ada": Device(960, 364e12, 32, 307.2 / 2, 47.6e9),  # 48 GB with ECC, PCIe 4
    "rtx-pro-6000": Device(1792, 500e12, 64, 307.2 / 2, 101e9),  # 96 GB, PCIe 5
    # 96 GB of HBM3; NVLink-C2C's 900 GB/s are 450 in each direction; all of Grace's 480 GB LPDDR5X is one server's.
    "gh200": Device(
        4000, 990e12, 450, 384, 101e9, note="Grace is an Arm CPU: sglang-scout needs x86-64"
    ),
    # ScoutAttention's: 80 GB at 1.9 TB/s, PCIe 4 x16, 36 cores that attend at 100 GB/s; FLOP/s of an A100, as the paper
    # names no GPU.
    "paper": Device(1900, 312e12, 32, 100, 84e9),
}
"""Rates of NVIDIA's data sheets, of dense bfloat16, and of 8 memory channels. Memory: free on an idle device, as its 80
GB are 80 GiB. Until such a device is measured, shares reached and times are assumptions: 2 us per launch; the boundary
as measured on a CPU (docs/results/boundary.jsonl)."""
GPUS = tuple(name for name in DEVICES if name != "paper")


def low_end(device: Device) -> Device:
    """The device if a server on it were as slow, beyond bytes and launches, as the paper's on the paper's. Two
    constants, fitted to three published numbers (docs/results/predictions.md)."""
    return replace(device, unexplained_us=900.0, reached={**device.reached, "worker": 0.28})


def find_device(name: str) -> Device:
    """A device of the table, by a name as people and nvidia-smi write it, or of a JSON file of its fields."""
    if name.endswith(".json"):
        try:
            return Device(**json.loads(Path(name).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            known = ", ".join(f.name for f in fields(Device))
            raise ConfigError(
                f"plan: --gpu {name}: {error}; give a JSON object of some of {known}"
            ) from None
    by_name = {known.replace("-", ""): known for known in DEVICES}
    noise = r"nvidia|sxm\d?|\d+gb|hbm\de?|generation|blackwell|workstation edition|[^a-z0-9]"
    plain = re.sub(noise, "", name.lower())
    if plain in by_name:
        return DEVICES[by_name[plain]]
    near = [by_name[x] for x in difflib.get_close_matches(plain, by_name, cutoff=0.8)]
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise ConfigError(
        f"plan: --gpu {name}: unknown GPU{meant}, known are {', '.join(GPUS)}; for another give --gpu-gb N, its GiB, "
        "without predicted times"
    )


@dataclass(frozen=True)
class Step:
    """A predicted step. ``parts_us``, which add up, by name; ``beside_us`` overlap with them."""

    batch: int
    parts_us: dict[str, float]
    beside_us: dict[str, float]

    @property
    def us(self) -> float:
        return max(sum(self.parts_us.values()), *self.beside_us.values(), 0.0)

    @property
    def tokens_per_s(self) -> float:
        return self.batch * 1e6 / self.us if self.batch else 0.0

    @property
    def bound(self) -> str:
        """The largest part, or an overlapping one that exceeds the step."""
        inside = sum(self.parts_us.values())
        parts = {part: us for part, us in self.beside_us.items() if us > inside} or self.parts_us
        return max(parts, key=parts.__getitem__)

    def as_dict(self) -> dict[str, Any]:
        more = {"us": self.us, "tokens_per_s": self.tokens_per_s, "bound": self.bound}
        return asdict(self) | more


def _products(model: ModelConfig, device: Device, batch: int) -> dict[str, float]:
    idle = (1 - model.expert_share) ** batch * model.expert_bytes
    value_bytes, parameters = model.value_bytes, model.query_parameters

    def longer(part: str, nbytes: float, parameters: float) -> float:
        flop_us = device.us(part, device.flop_s / 1e9, 2 * parameters * batch)
        return max(device.us(part, device.memory_gb_s, nbytes), flop_us)

    return {
        "weights": longer("weights", model.read_bytes - idle, model.bytes_a_token / value_bytes),
        "look-ahead": longer("look-ahead", parameters * value_bytes, parameters),
    }


def stock_step(server: Server, device: Device, batch: int) -> Step:
    """All KV on the device, full attention."""
    kv_bytes = batch * server.context_tokens * server.kv_bytes_per_token
    parts = {
        "weights": _products(server.model, device, batch)["weights"],
        "attention": device.us("attention", device.memory_gb_s, kv_bytes),
        "launches": server.model.num_layers * LAUNCHES["stock"] * device.launch_us,
    }
    return Step(batch, parts, {})


def offload_step(
    server: Server, device: Device, batch: int, missing_share: float = MISSING_SHARE
) -> Step:
    """Attention over the budget; the CPU computes ``missing_share`` of it."""
    model, layers = server.model, server.model.num_layers
    kv_bytes = batch * server.budget_tokens * server.kv_bytes_per_token
    asked = layers * model.num_q_heads * model.head_dim * RING_VALUE_BYTES if missing_share else 0
    launches = LAUNCHES["offload"] + (LAUNCHES["ahead"] if device.in_order else 0)
    parts = _products(model, device, batch) | {
        "scores": device.us("scores", device.memory_gb_s, batch * server.digest_bytes_per_request),
        "attention": device.us("attention", device.memory_gb_s, (1 - missing_share) * kv_bytes),
        "launches": layers * launches * device.launch_us,
        "ring": device.us("ring", device.link_gb_s, batch * (asked + server.kv_bytes_per_token)),
        "unexplained": layers * device.unexplained_us if missing_share else 0.0,
    }
    layer = sum(parts.values()) / layers
    worker = device.us("worker", device.host_gb_s, missing_share * kv_bytes) / layers
    first = max(0.0, worker - parts["attention"] / layers)
    parts["wait"] = (layers - 1) * max(0.0, worker - layer) + first
    copies = device.us("copies", device.link_gb_s, RECALLED_SHARE * kv_bytes * bool(missing_share))
    return Step(batch, parts, {"copies": copies, "boundary": device.boundary(batch)})


def dense_step(server: Server, device: Device, batch: int) -> Step | None:
    """Full attention over resident pages; None if ours would select pages instead, as in `StepEngine`."""
    beyond = batch * (server.context_tokens - server.budget_tokens) * server.kv_bytes_per_token
    if beyond > server.model.query_parameters * server.model.value_bytes:
        return None
    parts = stock_step(server, device, batch).parts_us | {
        "launches": server.model.num_layers * LAUNCHES["dense"] * device.launch_us,
        "ring": device.us("ring", device.link_gb_s, batch * server.kv_bytes_per_token),
    }
    return Step(batch, parts, {"boundary": device.boundary(batch)})


@dataclass(frozen=True)
class Prediction:
    """Stock and offload at the largest batch that fits each."""

    device: Device = field(compare=False)
    stock: Step
    offload: Step
    # The batch from which on offload is faster than stock's best, and its host pages; None: none that fits is.
    wins_from: int | None
    wins_host_bytes: int | None

    @property
    def speed_up(self) -> float | None:
        """Of tokens per second; None if not even one request fits stock."""
        return self.offload.tokens_per_s / self.stock.tokens_per_s if self.stock.batch else None


def has_model(policy: Policy) -> bool:
    """Whether the model applies to this policy: the CPU attends to missing pages a layer ahead."""
    return policy.route == "cpu" and policy.query.attends and bool(policy.query.targets(0, 2))


def predict(plan: Plan, device: Device) -> tuple[Prediction, Prediction]:
    """Low and high end of a plan with the device's memory. To be shown with :data:`CAVEAT`."""
    return _predict(plan, low_end(device)), _predict(plan, device)


def _predict(plan: Plan, device: Device) -> Prediction:
    assert plan.stock is not None and plan.gpu_kv_bytes is not None
    server, page_bytes = plan.server, plan.server.kv_bytes_per_page

    def ours(batch: int) -> Step:
        held = server.host_pages(batch) * page_bytes + batch * server.digest_bytes_per_request
        if held > plan.gpu_kv_bytes:
            return offload_step(server, device, batch)
        # All are resident.
        return dense_step(server, device, batch) or offload_step(server, device, batch, 0.0)

    stock = stock_step(server, device, plan.stock["requests"])
    batches = range(plan.requests, 0, -1)
    slower = next((b for b in batches if ours(b).tokens_per_s <= stock.tokens_per_s), 0)
    wins = slower + 1 if slower < plan.requests else None
    nbytes = None if wins is None else server.host_pages(wins) * page_bytes
    return Prediction(device, stock, ours(plan.requests), wins, nbytes)
