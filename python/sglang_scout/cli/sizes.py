"""Computes ``sglang-scout plan``: a model's shape and weight size, and how many requests fit, by the memory plan of a
decode server (``engine/memory.py``): resident pages are a budget for every request, and CPUs suffice for all partial
results."""

from __future__ import annotations

import bisect
import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils.hub import cached_file

from sglang_scout.cli import GIB
from sglang_scout.core.config import DEFAULT_HOST_SHARE, OffloadConfig
from sglang_scout.core.errors import ArenaError, ConfigError
from sglang_scout.core.flags import FP8_KV, check_architecture, check_attention, parse_config
from sglang_scout.engine.memory import MemoryPlan, ServerSize
from sglang_scout.engine.stores import ModelShape
from sglang_scout.policy import Context, make_policy, policies
from sglang_scout.worker.host_memory import HUGE_PAGE_BYTES, available_bytes, free_pool_bytes
from sglang_scout.worker.ring import MAX_BATCH, MAX_THREADS_PER_GROUP

VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_TOKENS, MAX_GIB = 2**40, 2**30


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_context_tokens: int
    dtype: str  # of weights and digests, resolved
    kv_dtype: str
    weight_bytes: int
    weight_source: str  # of the number
    embedding_bytes: int  # of them; a step reads one row per token; 0 if tied with the head
    expert_bytes: int = 0  # of them, all experts of an MoE model
    expert_share: float = 1.0  # of a layer's experts, what a token uses

    @property
    def value_bytes(self) -> int:
        return VALUE_BYTES[self.dtype]

    @property
    def read_bytes(self) -> int:
        """Of the weights, what a step reads that uses all experts."""
        return self.weight_bytes - self.embedding_bytes

    @property
    def bytes_a_token(self) -> int:
        """Of the weights, what a token uses."""
        return self.read_bytes - int((1 - self.expert_share) * self.expert_bytes)

    @property
    def query_parameters(self) -> int:
        """Of W_q of all layers."""
        return self.num_layers * self.hidden_size * self.num_q_heads * self.head_dim


def read_model(model_path: str, dtype: str, kv_cache_dtype: str = "auto") -> ModelConfig:
    """Reads a model's config.json and the sizes of its files, without network. Arguments as SGLang's flags. Raises
    ConfigError: no model, one that --kv-offload does not support, or quantised weights without files."""
    flag = f"plan: --model-path {model_path}"
    config, folder = _load(flag, model_path)
    text = config.get_text_config()
    architecture = str((config.architectures or ["(no architecture named)"])[0])
    check_architecture(flag, architecture)
    layers, heads, hidden = text.num_hidden_layers, text.num_attention_heads, text.hidden_size
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    # MLPs of a layer, how many a token uses, the inner size of one. A dense layer has one.
    experts, taken, inner = 1, 1, text.intermediate_size
    for name in ("num_local_experts", "num_experts"):
        if found := getattr(text, name, None):
            experts, taken = found, text.num_experts_per_tok
            inner = getattr(text, "moe_intermediate_size", inner)
    context, vocabulary = text.max_position_embeddings, text.vocab_size
    sizes = layers, heads, kv_heads, hidden, experts, taken, inner, context, vocabulary
    if min(sizes) < 1 or heads % kv_heads or taken > experts:
        raise ConfigError(
            f"{flag}: config.json has {layers} layers of size {hidden} with {heads} query heads and {kv_heads} KV "
            f"heads, {taken} of {experts} MLPs of size {inner} for a token, a context of {context} tokens and "
            f"{vocabulary} words, expected positive numbers, and a divisor of the query heads; copy the model's own "
            "file again"
        )
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    window = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    v_head_dim = getattr(text, "v_head_dim", head_dim)
    check_attention(flag, head_dim=head_dim, v_head_dim=v_head_dim, has_window=bool(window))
    stored = str(config.dtype or text.dtype or "float32").removeprefix("torch.")
    if stored not in VALUE_BYTES:
        raise ConfigError(
            f"{flag}: config.json has dtype {stored}, expected one of {', '.join(VALUE_BYTES)}; choose another model"
        )
    used = ("float16" if stored == "float32" else stored) if dtype == "auto" else dtype
    in_experts = layers * 3 * hidden * inner * experts
    tables = (1 if text.tie_word_embeddings else 2) * hidden * vocabulary
    # Of a decoder with gated MLPs; norms, biases and routers are negligible.
    parameters = in_experts + tables + layers * hidden * head_dim * (2 * heads + 2 * kv_heads)
    weight_bytes, source = _weights(flag, folder, config, parameters, stored, used)
    embedding = 0 if text.tie_word_embeddings else vocabulary * hidden * VALUE_BYTES[used]
    return ModelConfig(
        architecture=architecture,
        num_layers=layers,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        max_context_tokens=context,
        dtype=used,
        kv_dtype=FP8_KV.get(kv_cache_dtype, used),
        weight_bytes=weight_bytes,
        weight_source=source,
        embedding_bytes=min(embedding, weight_bytes),
        expert_bytes=int(in_experts / parameters * weight_bytes) if experts > 1 else 0,
        expert_share=taken / experts,
    )


def _load(flag: str, model_path: str) -> tuple[Any, Path]:
    """The model's config.json as transformers reads it, and its folder."""
    if Path(model_path).is_absolute() and not Path(model_path).is_dir():
        raise ConfigError(f"{flag}: there is no such folder")
    try:
        folder = Path(str(cached_file(model_path, "config.json", local_files_only=True))).parent
        return AutoConfig.from_pretrained(folder, trust_remote_code=False), folder
    except Exception as error:  # transformers names no set of them
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(
            f"{flag}: cannot read config.json: {reason}; give the folder of a model, with the model's own file, or the "
            "name of one that has been downloaded from the Hugging Face Hub"
        ) from None


def _weights(
    flag: str, folder: Path, config: Any, parameters: int, stored: str, used: str
) -> tuple[int, str]:
    """Bytes of the weights, and the source of the number: their files, the index of these, or the parameters."""
    source, index = "from safetensors files", folder / "model.safetensors.index.json"
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not size:
        source = f"from {index.name}"
        with contextlib.suppress(Exception):  # absent, or not one that anybody would write
            size = int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    if getattr(config, "quantization_config", None):
        if size <= 0:
            raise ConfigError(
                f"{flag}: the size of quantised weights is only known from their safetensors files, and there are "
                "none; give a folder that has them"
            )
        return size, f"{source}, quantised"
    if size <= 0:
        size = parameters * VALUE_BYTES[stored]
        source = "estimated from config.json, without safetensors files"
    elif VALUE_BYTES[used] != VALUE_BYTES[stored]:
        source += ", converted"
    return size * VALUE_BYTES[used] // VALUE_BYTES[stored], source


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


class Plan:
    """How many requests fit into ``host_bytes`` of KV pages and, if given, ``gpu_kv_bytes`` of GPU memory beside the
    weights; and the memory of as many, or of those ``asked`` for. Raises ArenaError if a size is out of range."""

    def __init__(
        self, server: Server, host_bytes: int, gpu_kv_bytes: int | None, asked: int | None
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
        self.requests = self.offload["requests"] if asked is None else asked
        self.fits = self.offload["requests"] >= (asked or 1)
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
    gpu_kv_bytes = None
    if gpu_gib is not None:
        gpu_kv_bytes = max(0, int(gpu_gib * GIB * mem_fraction) - model.weight_bytes)
    try:
        return Plan(server, int(host_gib * GIB), gpu_kv_bytes, requests)
    except ArenaError as error:
        raise ConfigError(
            f"plan: --model-path {model_path}, --kv-offload-budget {settings.budget_tokens}: {error}; lower the "
            "budget, --context-tokens or --requests, or choose another model"
        ) from None
