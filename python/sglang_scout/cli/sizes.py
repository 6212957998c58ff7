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
from sglang_scout.engine.memory import MemoryPlan, ServerSize
from sglang_scout.engine.stores import ModelShape
from sglang_scout.policy import Context, make_policy, policies
from sglang_scout.worker.host_memory import HUGE_PAGE_BYTES, available_bytes, free_pool_bytes
from sglang_scout.worker.ring import MAX_BATCH, MAX_THREADS_PER_GROUP

MAX_TOKENS, MAX_GIB = 2**40, 2**30


def server_config(name: str, keys: str, budget_tokens: int | None = None) -> OffloadConfig:
    """The configuration of a server with this policy; arguments as of :func:`parse_config`."""
    if name not in (known := policies()):
        names = ", ".join(known)
        raise ConfigError(f"--kv-offload {name!r}: unknown policy; choose one of {names}")
    return parse_config(policy=name, policies=known, config=keys, budget_tokens=budget_tokens)


class Server:
    """A decode server for requests of ``context_tokens``. Its sizes are over all layers."""

    def __init__(self, model: ModelConfig, config: OffloadConfig, context_tokens: int) -> None:
        self.model, self.config, self.context_tokens = model, config, context_tokens
        self.policy = make_policy(Context(config, model.num_layers, page_bytes=1))
        self.lists = config.lists(model.num_kv_heads)
        self.max_requests = MAX_BATCH // self.lists
        self.kv_bytes_per_page = self.size(1).page_bytes
        self.kv_bytes_per_token = self.kv_bytes_per_page // config.page_size_tokens
        self.digest_bytes_per_page = self.policy.rule.digest_bytes(self.size(1).shape)
        self.pages_per_request = math.ceil(context_tokens / config.page_size_tokens)
        self.kv_bytes_per_request = self.pages_per_request * self.kv_bytes_per_page

    def size(self, requests: int) -> ServerSize:
        model, kv = self.model, self.model.kv_dtype
        heads = model.num_q_heads, model.num_kv_heads, model.head_dim
        dtype, fp8 = getattr(torch, model.dtype), None if kv == model.dtype else getattr(torch, kv)
        page_size = self.config.page_size_tokens
        shape = ModelShape(model.num_layers, *heads, page_size, dtype, scale=1.0, fp8=fp8)
        node_cpus = [max(requests * self.lists, MAX_THREADS_PER_GROUP)]
        sizes = requests, self.context_tokens, node_cpus
        return ServerSize(self.config, self.policy, shape, *sizes)

    def host_pages(self, requests: int) -> int:
        """Pages of ``requests`` requests, plus page 0, SGLang's padding."""
        return requests * self.pages_per_request + 1

    def memory(self, requests: int, num_pages: int | None = None) -> MemoryPlan:
        """The plan for concurrent requests, by default with only the pages that they need."""
        return self.size(requests).plan(num_pages or self.host_pages(requests))

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


class Plan:
    """The command's output.

    Args:
        host_bytes: for KV pages.
        gpu_kv_bytes: GPU memory after the weights, if its size was given.
        asked: requests to plan for; None: as many as fit.
    Raises:
        ArenaError: a size is out of range.
    """

    def __init__(
        self,
        server: Server,
        host_bytes: int,
        gpu_kv_bytes: int | None,
        offload: Fit,
        stock: Fit | None,
        asked: int | None,
    ) -> None:
        self.server, self.host_bytes, self.gpu_kv_bytes = server, host_bytes, gpu_kv_bytes
        self.offload, self.stock, self.asked = offload, stock, asked
        self.requests = offload.requests if asked is None else asked
        self.fits = offload.requests >= (asked or 1)
        count = max(self.requests, 1)
        self.memory = server.memory(count)
        # --kv-offload-host-gb for these. Rounded up: rounding down would be a page short.
        self.host_gib = math.ceil(self.memory.bytes_of("host pages") / GIB * 10) / 10
        # Pages of 2 MiB that the arena of a server with that flag takes on one NUMA node.
        num_pages = int(self.host_gib * GIB) // server.kv_bytes_per_page + 1
        self.huge_pages = -(-server.memory(count, num_pages).arena_bytes // HUGE_PAGE_BYTES)


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
    server = Server(model, settings, context_tokens or model.max_context_tokens)
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
        return Plan(server, host_bytes, gpu_kv_bytes, Fit(by_host, by_gpu), stock, requests)
    except ArenaError as error:
        raise ConfigError(
            f"plan: --model-path {model_path}, --kv-offload-budget {settings.budget_tokens}: {error}; lower the "
            "budget, --context-tokens or --requests, or choose another model"
        ) from None
