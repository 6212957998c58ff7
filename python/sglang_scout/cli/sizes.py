"""Computes ``sglang-scout plan``: how many requests fit, by the memory plan of a decode server (``engine/memory.py``):
resident pages are a budget for every request, and CPUs suffice for all partial results."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any

import torch

from sglang_scout.cli import GIB
from sglang_scout.cli.models import ModelConfig, read_model, read_shape
from sglang_scout.core.config import DEFAULT_HOST_SHARE, OffloadConfig
from sglang_scout.core.errors import ArenaError, ConfigError
from sglang_scout.core.flags import parse_config
from sglang_scout.engine.memory import MemoryPlan, ServerSize
from sglang_scout.engine.stores import ModelShape
from sglang_scout.policy import Context, make_policy, policies
from sglang_scout.worker.host_memory import HUGE_PAGE_BYTES, available_bytes, free_pool_bytes
from sglang_scout.worker.ring import MAX_BATCH, MAX_THREADS_PER_GROUP

MAX_TOKENS, MAX_GIB = 2**40, 2**30
DEFAULT_MEM_FRACTION = 0.88


def server_config(name: str, keys: str, budget_tokens: int | None = None) -> OffloadConfig:
    """The configuration of a server with this policy, other than none; arguments as of :func:`parse_config`."""
    if name not in (known := policies()):
        names = ", ".join(known)
        raise ConfigError(f"--kv-offload {name!r}: unknown policy; choose one of {names}")
    return parse_config(policy=name, policies=known, config=keys, budget_tokens=budget_tokens)


class Server:
    """A decode server for requests of ``context_tokens``. Its sizes are over all layers."""

    def __init__(self, model: ModelConfig, config: OffloadConfig, context_tokens: int) -> None:
        self.model, self.config, self.context_tokens = model, config, context_tokens
        self.policy = make_policy(Context(config, model.num_layers, page_bytes=1))
        self.budget_tokens = min(config.budget_tokens, context_tokens)
        self.lists = config.lists(model.num_kv_heads)
        self.max_requests = MAX_BATCH // self.lists
        self.kv_bytes_per_page = self.size(1).page_bytes
        self.kv_bytes_per_token = self.kv_bytes_per_page // config.page_size_tokens
        self.digest_bytes_per_page = self.policy.rule.digest_bytes(self.size(1).shape)
        self.pages_per_request = math.ceil(context_tokens / config.page_size_tokens)
        self.kv_bytes_per_request = self.pages_per_request * self.kv_bytes_per_page
        self.digest_bytes_per_request = self.pages_per_request * self.digest_bytes_per_page

    def size(self, requests: int) -> ServerSize:
        model, page_size = self.model, self.config.page_size_tokens
        heads = model.num_q_heads, model.num_kv_heads, model.head_dim
        dtype, kv = getattr(torch, model.dtype), getattr(torch, model.kv_dtype)
        fp8 = None if kv == dtype else kv
        shape = ModelShape(model.num_layers, *heads, page_size, dtype, scale=1.0, fp8=fp8)
        sizes = requests, self.context_tokens, [max(requests * self.lists, MAX_THREADS_PER_GROUP)]
        return ServerSize(self.config, self.policy, shape, *sizes)

    def host_pages(self, requests: int) -> int:
        """With page 0, SGLang's padding."""
        return requests * self.pages_per_request + 1

    def memory(self, requests: int, num_pages: int | None = None) -> MemoryPlan:
        """The plan for concurrent requests, by default with only the pages that they need."""
        return self.size(requests).plan(num_pages or self.host_pages(requests))

    def fitting(self, device_bytes: int) -> int:
        """The most requests whose plan fits in ``device_bytes``."""
        counts = range(1, self.max_requests + 1)
        return bisect.bisect_right(counts, device_bytes, key=lambda n: self.memory(n).device_bytes)


def fit(by_host: int | None, by_gpu: int | None) -> dict[str, Any]:
    """How many requests fit, by each memory; None: not considered."""
    requests = min(n for n in (by_host, by_gpu) if n is not None)
    limit = "host memory" if by_host == requests else "gpu memory"
    return {"by_host": by_host, "by_gpu": by_gpu, "requests": requests, "limited_by": limit}


@dataclass(frozen=True)
class Asked:
    """The command's arguments, None where not given. One of the first two is."""

    model_path: str | None = None
    shape: str | None = None
    context_tokens: int | None = None
    requests: int | None = None
    budget_tokens: int | None = None
    host_gib: float | None = None
    gpu_gib: float | None = None
    mem_fraction: float = DEFAULT_MEM_FRACTION
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    policy: str = "scout"
    config: str = "{}"


class Plan:
    """How many requests fit into ``host_bytes`` of KV pages and, if given, ``gpu_kv_bytes`` of GPU memory beside the
    weights; and the memory of as many, or of those ``asked`` for. Raises ArenaError if a size is out of range."""

    def __init__(
        self, server: Server, host_bytes: int, gpu_kv_bytes: int | None, asked: Asked
    ) -> None:
        self.server, self.host_bytes, self.gpu_kv_bytes = server, host_bytes, gpu_kv_bytes
        host_pages = max(0, host_bytes // server.kv_bytes_per_page - 1)
        by_host = min(host_pages // server.pages_per_request, server.max_requests)
        by_gpu = self.stock = None
        # Without a GPU's size digests and resident pages are host memory too, in addition to that of the pages, so they
        # do not change how many requests fit.
        if gpu_kv_bytes is not None:
            by_gpu = server.fitting(gpu_kv_bytes)
            self.stock = fit(None, gpu_kv_bytes // server.kv_bytes_per_request)
        self.offload, self.asked = fit(by_host, by_gpu), asked
        self.requests = self.offload["requests"] if asked.requests is None else asked.requests
        self.fits = self.offload["requests"] >= (asked.requests or 1)
        self.count = max(self.requests, 1)
        self.memory = server.memory(self.count)
        # --kv-offload-host-gb for these. Rounded up: rounding down would be a page short.
        self.host_gib = _tenth(self.memory.bytes_of("host pages") / GIB)
        # Pages of 2 MiB that the arena of a server with that flag takes on one NUMA node.
        num_pages = int(self.host_gib * GIB) // server.kv_bytes_per_page + 1
        self.huge_pages = -(-server.memory(self.count, num_pages).arena_bytes // HUGE_PAGE_BYTES)

    @property
    def gpu_gib(self) -> float:
        """Memory of a GPU on which these requests fit."""
        needed = self.memory.device_bytes + self.server.model.weight_bytes
        return _tenth(needed / GIB / self.asked.mem_fraction)

    def longest(self) -> int:
        """Tokens of the longest context of which these requests fit; 0: not even one page."""
        server, page = self.server, self.server.config.page_size_tokens

        def is_short(pages: int) -> bool:
            shorter = Server(server.model, server.config, pages * page)
            return not Plan(shorter, self.host_bytes, self.gpu_kv_bytes, self.asked).fits

        return page * bisect.bisect_left(range(1, server.pages_per_request), True, key=is_short)


def make_plan(model_path: str | None = None, **options: Any) -> Plan:
    """The plan for the command's arguments, see :class:`Asked`. Raises ConfigError with flag, value and fix."""
    asked = Asked(model_path, **options)
    for flag, value, most in (
        ("--context-tokens", asked.context_tokens, MAX_TOKENS),
        ("--requests", asked.requests, MAX_BATCH),
        ("--host-gb", asked.host_gib, MAX_GIB),
        ("--gpu-gb", asked.gpu_gib, MAX_GIB),
        ("--mem-fraction-static", asked.mem_fraction, 1),
    ):
        if value is not None and not 0 < value <= most:
            raise ConfigError(
                f"plan: {flag} {value}: out of range; give more than 0 and at most {most}"
            )
    settings = server_config(asked.policy, asked.config, asked.budget_tokens)
    read = read_shape if asked.shape else read_model
    model = read(asked.shape or asked.model_path or "", asked.dtype, asked.kv_cache_dtype)
    if not (context_tokens := asked.context_tokens or model.max_context_tokens):
        raise ConfigError("plan: --shape needs a context; add for example --context 65536")
    model.stretched(context_tokens)  # or refused
    server = Server(model, settings, context_tokens)
    host_gib, gpu_kv_bytes = asked.host_gib, None
    if host_gib is None:  # about as a server decides
        share, pool = available_bytes() * DEFAULT_HOST_SHARE, free_pool_bytes()
        host_gib = (pool if 2 * pool >= share else share) / GIB
    if asked.gpu_gib is not None:
        gpu_kv_bytes = max(0, int(asked.gpu_gib * GIB * asked.mem_fraction) - model.weight_bytes)
    try:
        return Plan(server, int(host_gib * GIB), gpu_kv_bytes, asked)
    except ArenaError as error:
        name = f"--shape {asked.shape}" if asked.shape else f"--model-path {model_path}"
        raise ConfigError(
            f"plan: {name}, --kv-offload-budget {settings.budget_tokens}: {error}; lower the budget, --context-tokens "
            "or --requests, or choose another model"
        ) from None


def _tenth(gib: float) -> float:
    return math.ceil(gib * 10) / 10
