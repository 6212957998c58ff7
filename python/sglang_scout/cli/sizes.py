"""Computes ``sglang-scout plan``: how many requests fit, by the memory plan of a decode server (``engine/memory.py``).

Resident pages are a budget for every request. CPUs are assumed to suffice for all partial results.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import torch

from sglang_scout.cli.model_config import ModelConfig, read_model
from sglang_scout.cli.table import GIB
from sglang_scout.core.config import DEFAULT_HOST_SHARE, OffloadConfig
from sglang_scout.core.errors import ArenaError, ConfigError
from sglang_scout.core.flags import parse_config
from sglang_scout.core.forecast import pilot_rank
from sglang_scout.engine.memory import MemoryPlan, ServerSize
from sglang_scout.engine.stores import ModelShape
from sglang_scout.policy.base import Context, Policy, make_policy, policies
from sglang_scout.worker.host_memory import HUGE_PAGE_BYTES, available_bytes, free_pool_bytes
from sglang_scout.worker.ring import MAX_BATCH, MOST_THREADS_PER_GROUP

MAX_TOKENS, MAX_GIB = 2**40, 2**30


def server_config(name: str, keys: str, budget_tokens: int | None = None) -> OffloadConfig:
    """The configuration of a server with this policy; arguments as of :func:`parse_config`."""
    if name not in (known := policies()):
        names = ", ".join(known)
        raise ConfigError(f"--kv-offload {name!r}: unknown policy; choose one of {names}")
    return parse_config(policy=name, policies=known, config=keys, budget_tokens=budget_tokens)


@dataclass(frozen=True)
class Server:
    """A decode server for requests of ``context_tokens``. Its sizes are over all layers."""

    model: ModelConfig
    config: OffloadConfig
    policy: Policy
    pilot_rank: int
    context_tokens: int

    def size(self, requests: int) -> ServerSize:
        model, kv = self.model, self.model.kv_dtype
        heads = model.num_q_heads, model.num_kv_heads, model.head_dim
        dtype, fp8 = getattr(torch, model.dtype), None if kv == model.dtype else getattr(torch, kv)
        page_size = self.config.page_size_tokens
        shape = ModelShape(model.num_layers, *heads, page_size, dtype, scale=1.0, fp8=fp8)
        cpus = max(requests * self.config.lists(model.num_kv_heads), MOST_THREADS_PER_GROUP)
        sizes = requests, self.context_tokens, [cpus]
        return ServerSize(self.config, shape, *sizes, self.policy.route, self.pilot_rank)

    @property
    def kv_bytes_per_page(self) -> int:
        return self.size(1).page_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.kv_bytes_per_page // self.config.page_size_tokens

    @property
    def digest_bytes_per_page(self) -> int:
        return self.size(1).digest_bytes

    @property
    def pages_per_request(self) -> int:
        return math.ceil(self.context_tokens / self.config.page_size_tokens)

    @property
    def kv_bytes_per_request(self) -> int:
        return self.pages_per_request * self.kv_bytes_per_page

    def host_pages(self, requests: int) -> int:
        """Pages of ``requests`` requests, plus page 0, SGLang's padding."""
        return requests * self.pages_per_request + 1

    def memory(self, requests: int, num_pages: int | None = None) -> MemoryPlan:
        """The plan for concurrent requests, by default with only the pages that they need."""
        return self.size(requests).plan(num_pages or self.host_pages(requests))

    @property
    def max_requests(self) -> int:
        return MAX_BATCH // self.config.lists(self.model.num_kv_heads)

    def fitting(self, device_bytes: int) -> int:
        """The most requests whose plan fits in ``device_bytes``."""
        counts = range(1, self.max_requests + 1)
        return bisect.bisect_right(counts, device_bytes, key=lambda n: self.memory(n).device_bytes)


@dataclass(frozen=True)
class Fit:
    """How many requests fit, by each memory; None: not considered."""

    by_host: int | None
    by_gpu: int | None

    @property
    def requests(self) -> int:
        return min(n for n in (self.by_host, self.by_gpu) if n is not None)

    @property
    def limited_by(self) -> str:
        return "host memory" if self.by_host == self.requests else "gpu memory"


@dataclass(frozen=True)
class Plan:
    """The command's output."""

    server: Server
    host_bytes: int  # for KV pages
    gpu_kv_bytes: int | None  # GPU memory after the weights, if its size was given
    offload: Fit
    stock: Fit | None
    asked: int | None  # requests to plan for; None: as many as fit
    memory: MemoryPlan  # of these, or of one if none fits

    @property
    def requests(self) -> int:
        return self.offload.requests if self.asked is None else self.asked

    @property
    def fits(self) -> bool:
        """Whether the asked number of requests, or any at all, fits with offload."""
        return self.offload.requests >= (self.asked or 1)

    @property
    def host_gib(self) -> float:
        """--kv-offload-host-gb for these requests. Rounded up: rounding down would be a page short."""
        return math.ceil(self.memory.bytes_of("host pages") / GIB * 10) / 10

    @property
    def huge_pages(self) -> int:
        """Pages of 2 MiB that the arena of a server with that flag takes on one NUMA node."""
        num_pages = int(self.host_gib * GIB) // self.server.kv_bytes_per_page + 1
        memory = self.server.memory(max(self.requests, 1), num_pages)
        return -(-memory.arena_bytes // HUGE_PAGE_BYTES)


def make_plan(
    model_path: str,
    *,
    context_tokens: int | None = None,
    requests: int | None = None,
    budget_tokens: int | None = None,
    host_gib: float | None = None,
    gpu_gib: float | None = None,
    mem_fraction: float = 0.88,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    policy: str = "scout",
    config: str = "{}",
) -> Plan:
    """The plan for the command's arguments, None where not given. Raises ConfigError with flag, value and fix."""
    for flag, value, most in (
        ("--context-tokens", context_tokens, MAX_TOKENS),
        ("--requests", requests, MAX_BATCH),
        ("--host-gb", host_gib, MAX_GIB),
        ("--gpu-gb", gpu_gib, MAX_GIB),
        ("--mem-fraction-static", mem_fraction, 1),
    ):
        if value is not None and not 0 < value <= most:
            raise ConfigError(f"plan: {flag} {value}: must be greater than 0 and at most {most}")
    settings = server_config(policy, config, budget_tokens)
    model = read_model(model_path, dtype, kv_cache_dtype)
    made = make_policy(Context(settings, model.num_layers, page_bytes=1))
    context = context_tokens or model.max_context_tokens
    server = Server(model, settings, made, pilot_rank(settings), context)
    if host_gib is None:  # about as a server decides
        share, pool = available_bytes() * DEFAULT_HOST_SHARE, free_pool_bytes()
        host_gib = (pool if 2 * pool >= share else share) / GIB
    host_bytes = int(host_gib * GIB)
    by_gpu = stock = gpu_kv_bytes = None
    host_pages = max(0, host_bytes // server.kv_bytes_per_page - 1)
    by_host = min(host_pages // server.pages_per_request, server.max_requests)
    try:
        # Without --gpu-gb digests and resident pages are host memory too, in addition to --kv-offload-host-gb, so they
        # do not change how many requests fit in pages of that size.
        if gpu_gib is not None:
            gpu_kv_bytes = max(0, int(gpu_gib * GIB * mem_fraction) - model.weight_bytes)
            by_gpu = server.fitting(gpu_kv_bytes)
            stock = Fit(None, gpu_kv_bytes // server.kv_bytes_per_request)
        offload = Fit(by_host, by_gpu)
        memory = server.memory(max(requests or offload.requests, 1))
    except ArenaError as error:
        raise ConfigError(
            f"plan: --model-path {model_path}, --kv-offload-budget {settings.budget_tokens}: {error}; lower the "
            "budget, --context-tokens or --requests, or choose another model"
        ) from None
    return Plan(server, host_bytes, gpu_kv_bytes, offload, stock, requests, memory)
