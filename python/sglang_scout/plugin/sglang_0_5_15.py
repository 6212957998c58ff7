"""Specifics of SGLang 0.5.15.post1."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch
from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.model_executor import model_runner_kv_cache_mixin
from sglang.srt.server_args import ServerArgs

from sglang_scout.core.flags import FP8_KV

POOLS_MODULE = model_runner_kv_cache_mixin
"""Module from which SGLang takes its pool classes."""
FP8_ON_CPU = tuple(FP8_KV)
"""KV dtypes supported with the attention backend ``torch_native``."""

row_of = attrgetter("req_pool_idx")
"""A request's row of the request table."""
extend_end = attrgetter("extend_range.end")
"""Of a request: the end of the prompt chunk being prefilled."""
model_config = methodcaller("get_model_config")
"""The configuration of the model, from the flags."""
omp_cpus = attrgetter("local_omp_cpuid")
"""The CPUs that SGLang runs this rank's model on, as a CPU list, from a model runner; CPU device."""
pool_sizes = attrgetter("max_total_num_tokens", "max_running_requests")
"""Tokens and requests of the pools to be built, from what builds them."""


def with_fields(fields: dict[str, tuple[Any, Any, str]], module: str) -> type[ServerArgs]:
    """SGLang's class of server flags, and its parser, with more ``fields``: types, defaults, help. A new class, which
    processes find by name in ``module``; in this release the live one, to which SGLang holds references."""
    more = [(name, A[kind, Arg(help=text)], value) for name, (kind, value, text) in fields.items()]  # type: ignore[valid-type]
    made = dataclasses.make_dataclass("More", more, kw_only=True)
    ServerArgs.__dataclass_fields__.update(made.__dataclass_fields__)
    ServerArgs.__annotations__.update(made.__annotations__)
    for name, _, value in more:
        setattr(ServerArgs, name, value)
    return ServerArgs


def apply_defaults(args: ServerArgs) -> None:
    """SGLang settings implied by the flag in this release only."""
    if args.disaggregation_mode == "decode":
        # An MoE layer would leave the all-reduce of its output to the next layer, whose queries are predicted from that
        # output.
        args.enforce_disable_flashinfer_allreduce_fusion = True


def resolved(args: ServerArgs) -> ServerArgs:
    """SGLang's resolved flags and defaults, by field name."""
    return args


def default_of(field: str) -> Any:
    """SGLang's default of a flag; None if this release lacks it."""
    return getattr(ServerArgs, field, None)


def built_pools(runner: Any, result: Any) -> Any:
    """What has the KV pool and the allocator after the build."""
    return runner


def create_buffers(pool: Any, original: Callable[[], None]) -> None:
    """Create a KV pool's buffers by its own ``_create_buffers_normal``, and SGLang's metadata of them."""
    pool._create_buffers_normal()
    buffers = pool.k_buffer + pool.v_buffer
    pool.data_ptrs = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    pool.k_data_ptrs, pool.v_data_ptrs = pool.data_ptrs.tensor_split(2)
    pool.data_strides = torch.tensor([b[0].nbytes for b in buffers])


def layer_input(
    hidden_states: torch.Tensor, forward_batch: Any, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A decoder layer's input in two parts, which it sums."""
    return hidden_states, residual


def has_copy(req: Any) -> bool:
    """Whether there is a copy of the KV of this request, which has been retracted."""
    return hasattr(req, "kv_cache_cpu")
