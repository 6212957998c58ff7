"""What ``sglang-scout plan`` computes: memory per token and per request, and how many requests fit.

Only arithmetic on config.json and file sizes. With L layers, H KV heads, head size D, pages of S
tokens and values of w bytes:

    KV of a token      2 L H D w            (K and V)
    KV of a page       S times that         (host memory)
    digest of a page   L H x 2 D w          (minmax: 1/S of the page's KV)
                       L H x (5 D + 80)     (rotated-1), 4 D more (rotated-2)
    input buffers      48 S                (SGLang's; 6 words a token)
    resident pages     budget / S a request, its page being filled, and room for recalls once; at most
                       as many as there are host pages
    worker             the ring, and results of threads that share a request, for so many requests
                       (host memory, beside --kv-offload-host-gb)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_scout.cli.model_config import ModelConfig, read_model
from sglang_scout.core.config import (
    DEFAULT_DIGEST,
    DEFAULT_HOST_SHARE,
    FLAGS,
    PAGE_SIZE_TOKENS,
)
from sglang_scout.core.errors import ArenaError, ConfigError
from sglang_scout.core.page_bytes import digest_bytes, input_bytes
from sglang_scout.core.parse_config import parse_config
from sglang_scout.worker.host_memory import available_bytes
from sglang_scout.worker.ring import MOST_THREADS_PER_GROUP, worker_memory
from sglang_scout.worker.spec import ArenaSpec

GIB = 2**30
MAX_TOKENS, MAX_GIB = 2**40, 2**30
MAX_REQUESTS = 2**16
"""The server takes no more at once (``MAX_BATCH`` of the worker's arena)."""


@dataclass(frozen=True)
class Sizes:
    """What one token, page and request of ``context_tokens`` take, in bytes."""

    context_tokens: int
    budget_tokens: int
    page_size_tokens: int
    kv_bytes_per_token: int
    kv_bytes_per_page: int
    digest_bytes_per_page: int
    input_bytes_per_page: int
    host_pages_per_request: int
    kv_bytes_per_request: int
    digest_bytes_per_request: int
    input_bytes_per_request: int
    resident_bytes_per_request: int
    tail_bytes_per_request: int

    @property
    def device_bytes_per_request(self) -> int:
        """On the device beside the weights: digests, SGLang's input buffers, resident pages, the page being filled."""
        return (
            self.digest_bytes_per_request
            + self.input_bytes_per_request
            + self.resident_bytes_per_request
            + self.tail_bytes_per_request
        )

    @property
    def device_bytes_once(self) -> int:
        """On the device once per server: room for recalls under way, one budget of pages, and the digest
        of SGLang's padding page."""
        return self.resident_bytes_per_request + self._beside_bytes_per_page

    @property
    def _beside_bytes_per_page(self) -> int:
        """On the device, of a page that is not resident."""
        return self.digest_bytes_per_page + self.input_bytes_per_page

    def host_pages(self, requests: int) -> int:
        """Of so many requests. Page 0 is SGLang's padding and holds no request's tokens."""
        return requests * self.host_pages_per_request + 1

    def device_bytes(self, requests: int) -> int:
        """What so many requests need on the device. With a slot for every host page none is missing, so
        there are no more of them."""
        by_budget = requests * self.device_bytes_per_request + self.device_bytes_once
        of_page = self.kv_bytes_per_page + self._beside_bytes_per_page
        return min(by_budget, self.host_pages(requests) * of_page)

    def requests_on_device(self, size_bytes: int) -> int:
        """The most requests whose device_bytes are no more than that."""
        by_budget = (size_bytes - self.device_bytes_once) // self.device_bytes_per_request
        of_page = self.kv_bytes_per_page + self._beside_bytes_per_page
        by_page = (size_bytes // of_page - 1) // self.host_pages_per_request
        return max(0, by_budget, by_page)


def sizes_of(model: ModelConfig, context_tokens: int, budget_tokens: int, digest: str) -> Sizes:
    """The sizes for one model, context, budget and kind of digest."""
    page = PAGE_SIZE_TOKENS
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.kv_value_bytes
    pages = math.ceil(context_tokens / page)
    of_layer = digest_bytes(digest, model.num_kv_heads, model.head_dim, model.value_bytes)
    of_page = model.num_layers * of_layer
    return Sizes(
        context_tokens=context_tokens,
        budget_tokens=budget_tokens,
        page_size_tokens=page,
        kv_bytes_per_token=per_token,
        kv_bytes_per_page=per_token * page,
        digest_bytes_per_page=of_page,
        input_bytes_per_page=input_bytes(page),
        host_pages_per_request=pages,
        kv_bytes_per_request=pages * page * per_token,
        digest_bytes_per_request=pages * of_page,
        input_bytes_per_request=pages * input_bytes(page),
        resident_bytes_per_request=min(budget_tokens, pages * page) * per_token,
        tail_bytes_per_request=page * per_token,
    )


@dataclass(frozen=True)
class Fit:
    """How many requests fit, by each memory, and which one binds. None: not looked at."""

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
    """Everything that the command prints. ``requests`` is what was asked for, or None; ``gpu_kv_bytes`` is
    GPU memory after the weights, if its size was given."""

    model: ModelConfig
    sizes: Sizes
    host_bytes: int
    gpu_kv_bytes: int | None
    offload: Fit
    stock: Fit | None
    requests: int | None
    worker_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the asked number of requests, or any at all, fits with offload."""
        return self.offload.requests >= (self.requests or 1)


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
    digest: str = DEFAULT_DIGEST,
    kv_cache_dtype: str = "auto",
) -> Plan:
    """The plan for the command's arguments, None where not given.

    Raises:
        ConfigError: a wrong argument, or a model that cannot be read; names flag, value and fix.
    """
    _check_range("--context-tokens", context_tokens, MAX_TOKENS)
    _check_range("--requests", requests, MAX_REQUESTS)
    _check_range("--host-gb", host_gib, MAX_GIB)
    _check_range("--gpu-gb", gpu_gib, MAX_GIB)
    _check_range("--mem-fraction-static", mem_fraction, 1)
    budget = parse_config(
        policy="scout",
        policies={"scout": {}},
        budget_tokens=budget_tokens,
        flags=FLAGS | {"budget_tokens": "plan: --budget"},
    ).budget_tokens
    model = read_model(model_path, dtype, kv_cache_dtype)
    sizes = sizes_of(model, context_tokens or model.max_context_tokens, budget, digest)
    host_bytes = int(available_bytes() * DEFAULT_HOST_SHARE if host_gib is None else host_gib * GIB)
    by_gpu = stock = gpu_kv_bytes = None
    # Without --gpu-gb digests and resident pages are host memory too, beside what --kv-offload-host-gb
    # counts, so they do not change how many requests the pages of that size hold.
    if gpu_gib is not None:
        gpu_kv_bytes = max(0, int(gpu_gib * GIB * mem_fraction) - model.weight_bytes)
        by_gpu = sizes.requests_on_device(gpu_kv_bytes)
        stock = Fit(None, gpu_kv_bytes // sizes.kv_bytes_per_request)
    host_pages = max(0, host_bytes // sizes.kv_bytes_per_page - 1)
    by_host = min(host_pages // sizes.host_pages_per_request, MAX_REQUESTS)
    offload = Fit(by_host, by_gpu)
    at_once = max(requests or offload.requests, 1)
    return Plan(
        model=model,
        sizes=sizes,
        host_bytes=host_bytes,
        gpu_kv_bytes=gpu_kv_bytes,
        offload=offload,
        stock=stock,
        requests=requests,
        worker_bytes=_worker_bytes(model_path, model, sizes, at_once),
    )


def _worker_bytes(model_path: str, model: ModelConfig, sizes: Sizes, requests: int) -> int:
    """What a worker needs of host memory beside the pages, on one memory node and with CPUs enough."""
    page = sizes.page_size_tokens
    budget = min(sizes.budget_tokens, sizes.context_tokens)
    try:
        spec = ArenaSpec(
            num_layers=model.num_layers, num_pages=1, page_size=page, num_kv_heads=model.num_kv_heads,
            num_q_heads=model.num_q_heads, head_dim=model.head_dim, kv_dtype=model.kv_dtype, scale=1.0,
            max_batch=requests, max_pages=math.ceil(budget / page),
            q_dtype="bfloat16" if model.dtype == "bfloat16" else "float32",
        )  # fmt: skip
    except ArenaError as error:
        raise ConfigError(
            f"plan: --model-path {model_path}, --budget {sizes.budget_tokens}: {error}; lower the budget, "
            "or choose another model"
        ) from None
    cpus = max(spec.max_batch, MOST_THREADS_PER_GROUP)
    return worker_memory(spec, 0, [cpus]).total_bytes


def _check_range(flag: str, value: float | None, most: int) -> None:
    if value is not None and not 0 < value <= most:
        raise ConfigError(
            f"plan: {flag} {value}: must be greater than 0, and at most {most}; give a number between these"
        )
