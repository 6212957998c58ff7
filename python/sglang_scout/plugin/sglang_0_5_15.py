"""What is of SGLang 0.5.15.post1 alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.layers.dp_attention import get_attention_tp_group
from sglang.srt.model_executor import model_runner_kv_cache_mixin
from sglang.srt.server_args import ServerArgs

from sglang_scout.core.served_models import FP8_KV
from sglang_scout.plugin.fields import FIELDS

POOLS_MODULE = model_runner_kv_cache_mixin
"""Whose classes SGLang builds its pools from."""
FP8_ON_CPU = tuple(FP8_KV)
"""Of KV, with the attention backend ``torch_native``."""


def add_fields() -> None:
    """Insert the fields into the live dataclass ``ServerArgs``; its parser then has the flags. Idempotent.

    It is extended in place, not replaced, because SGLang and its plugins hold references to it.
    """
    for name, (kind, default, text) in FIELDS.items():
        if name in ServerArgs.__dataclass_fields__:
            continue
        annotation = A[kind, Arg(help=text)]  # type: ignore[valid-type]  # as SGLang's own fields have it
        field = dataclasses.field(default=default)
        field.name = name
        field.type = annotation
        field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
        field.kw_only = True
        ServerArgs.__dataclass_fields__[name] = field
        ServerArgs.__annotations__[name] = annotation
        setattr(ServerArgs, name, default)


def around_init(original: Callable[..., None], self: ServerArgs, *args: Any, **kwargs: Any) -> None:
    """The generated ``__init__`` does not know the new fields: set them here, pass the rest on."""
    for name, (_, default, _) in FIELDS.items():
        setattr(self, name, kwargs.pop(name, default))
    original(self, *args, **kwargs)


def apply_defaults(args: ServerArgs) -> None:
    """What the flag implies for SGLang's settings, besides what it implies in every release."""
    if args.disaggregation_mode == "decode":
        # A layer of experts would leave the sum over ranks of its output to the next one, whose queries are predicted
        # from that output.
        args.enforce_disable_flashinfer_allreduce_fusion = True


def resolved(args: ServerArgs) -> ServerArgs:
    """What SGLang has made of its flags and defaults, by the fields' names."""
    return args


def model_config(args: ServerArgs) -> Any:
    """The model that the flags name."""
    return args.get_model_config()


def tp_group() -> Any:
    """SGLang's process group of the ranks that share out a layer's heads."""
    return get_attention_tp_group()


def omp_cpus(runner: Any) -> str:
    """The CPUs that SGLang runs this rank's model on, as a list in text; CPU device."""
    return str(runner.local_omp_cpuid)


def pool_sizes(runner: Any) -> tuple[int, int]:
    """Tokens and requests of the pools that are about to be built."""
    return runner.max_total_num_tokens, runner.max_running_requests


def built_pools(runner: Any, result: Any) -> tuple[Any, Any]:
    """The KV pool and the allocator that have been built."""
    return runner.token_to_kv_pool, runner.token_to_kv_pool_allocator


def create_buffers(pool: Any, original: Callable[[], None]) -> None:
    """Buffers of a KV pool that makes them itself, by ``_create_buffers_normal``, and what SGLang knows of them."""
    pool._create_buffers_normal()
    buffers = pool.k_buffer + pool.v_buffer
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    pool.k_data_ptrs, pool.v_data_ptrs = pointers[: pool.layer_num], pointers[pool.layer_num :]
    pool.data_ptrs = pointers
    pool.data_strides = torch.tensor([b[0].nbytes for b in buffers])


def layer_input(
    hidden_states: torch.Tensor, forward_batch: Any, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A decoder layer's input in two parts, of which it takes the sum."""
    return hidden_states, residual


def row_of(req: Any) -> int:
    """A request's row of the request table."""
    return int(req.req_pool_idx)


def extend_end(req: Any) -> int:
    """Where the chunk of a prompt that is being prefilled ends."""
    return int(req.extend_range.end)


def prepare_sender(req: Any, device: str) -> None:
    """A part of a prompt's KV is about to be sent from ``device``."""


def kept_copy(req: Any) -> bool | None:
    """Whether the KV of a retracted request was kept; None: it was not retracted."""
    return req.kv_cache_cpu is not None if hasattr(req, "kv_cache_cpu") else None


def drop_copy(req: Any) -> None:
    """The KV of a request that is being retracted is not kept."""
    req.kv_cache_cpu = None


def around_resume_retracted_reqs(
    original: Callable[..., list[Any]], queue: Any, *args: Any, **kwargs: Any
) -> list[Any]:
    """Requests that are restored, to pages of their own. SGLang would look them up in the radix cache once more, and
    then neither lock the pages that it finds nor free those in whose place they are."""
    restored = original(queue, *args, **kwargs)
    for req in restored:
        # It has been looked up, and nothing was found; ChunkCache has no such node and is asked again.
        req.last_node = getattr(queue.tree_cache, "root_node", None)
    return restored
