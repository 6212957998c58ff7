"""Specifics of SGLang 0.5.23. The functions are documented in ``sglang_0_5_15.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
import torch
from sglang.srt import server_args as stock
from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
from sglang.srt.environ import envs
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.runtime_context import get_parallel

from sglang_scout.core.errors import ConfigError

POOLS_MODULE = kv_cache_configurator
FP8_ON_CPU = ()  # e4m3 only with AMX and its own backend


def with_fields(fields: dict[str, tuple[Any, Any, str]], module: str) -> Any:
    """A struct's fields are fixed when its class is created, so this class replaces SGLang's."""
    more = [(name, A[kind, Arg(help=text)], value) for name, (kind, value, text) in fields.items()]  # type: ignore[valid-type]
    bases = (stock.ServerArgs,)
    made = msgspec.defstruct("ServerArgs", more, bases=bases, module=module, dict=True)
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:
        engine.Engine.server_args_class = made
    return made


def apply_defaults(args: Any) -> None:
    if envs.SGLANG_RUST_SERVER.get():
        raise ConfigError("SGLANG_RUST_SERVER: bypasses the checks of --kv-offload; unset it")
    # Digests and arena need the pool's size at start; SGLang would choose it after graph capture.
    os.environ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"] = "0"
    # A running step may still write the cached pages that it sends early, and digests are computed from what is sent.
    os.environ["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "0"
    if args.disaggregation_mode == "decode":
        # The other backup copies device buffers, without checksums.
        args.disaggregation_decode_retraction_backup = "cpu_tensor"


resolved, model_config = resolving_view, model_config_of
row_of, extend_end = attrgetter("kv.req_pool_idx"), attrgetter("extend_end")
default_of = {x.name: x.default for x in msgspec.structs.fields(stock.ServerArgs)}.get


def omp_cpus(runner: Any) -> Any:
    from sglang.srt.utils.numa_utils import init_threads_binding

    return init_threads_binding(numa_index=runner.gpu_id, world_size=get_parallel().tp_size)


def pool_sizes(configurator: Any, *, sizes: Any, **_: Any) -> tuple[int, int]:
    return sizes.max_total_num_tokens, sizes.max_running_requests


def built_pools(configurator: Any, result: Any) -> Any:
    return result


def create_buffers(pool: Any, original: Callable[[], None]) -> None:
    original()


def layer_input(
    hidden_states: Any, forward_batch: Any, residual: None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The residual is in the batch; a pending add of the previous layer, with its all-reduce, is applied here."""
    stream = forward_batch.residual_stream
    pending = stream.pending
    if pending is None:  # first layer, or the previous one has added its output
        return stream.complete(hidden_states), None
    if not pending.update.is_plain_add:
        raise RuntimeError(
            f"--kv-offload: a layer's output is not added to the residual but handled by "
            f"{type(pending.update).__name__}; serve this model without --kv-offload"
        )
    return stream.complete(hidden_states), stream.residual


def has_copy(req: Any) -> bool:
    return req.kv.retraction_backup is not None
