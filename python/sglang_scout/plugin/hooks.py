"""The hook functions of a scheduler process. What each is for stands beside its target in ``install.py``."""

from __future__ import annotations

import copy
import functools
import logging
import resource
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.dp_attention import get_attention_tp_size
from sglang.srt.model_executor import model_runner_kv_cache_mixin as pools_module

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.engine.memory import (
    arena_sizes,
    bytes_beside_digests,
    check_memory,
    plan_memory,
)
from sglang_scout.engine.pools import ModelShape
from sglang_scout.plugin import status
from sglang_scout.plugin.allocator import DigestListener, ScoutAllocator
from sglang_scout.plugin.args import BACKEND_NAME, parse
from sglang_scout.plugin.host_size import host_bytes
from sglang_scout.plugin.install import TARGETS_OF_ROLE, verify
from sglang_scout.plugin.pool import (
    DigestKVPool,
    HostKVPool,
    carries,
    num_layers,
    without_digests,
)
from sglang_scout.plugin.ranks import AttentionRanks, nodes_of_worker
from sglang_scout.plugin.support import decoder_layers
from sglang_scout.worker.host_memory import available_bytes

logger = logging.getLogger(__name__)


def register_backend() -> None:
    """Make ``--decode-attention-backend scout`` known to SGLang."""

    @register_attention_backend(BACKEND_NAME)
    def create(runner: Any) -> Any:
        from sglang_scout.plugin.backend import ScoutAttnBackend

        verify(TARGETS_OF_ROLE["decode"])
        return ScoutAttnBackend(runner)


# Decode server -----------------------------------------------------------------------------------


def around_profile_available_bytes(
    original: Callable[..., int], runner: Any, *args: Any, **kwargs: Any
) -> int:
    """Bytes for the KV pages of this rank: its share of host memory, whatever the GPU has.

    All ranks must come to the same number of pages, as they allocate them alike.
    """
    config, ranks, shape = parse(runner.server_args), AttentionRanks(), model_shape(runner)
    if torch.device(runner.device).type == "cuda":
        # What SGLang would give to KV pages is shared by digests and resident pages.
        runner.kv_offload_device_bytes = original(runner, *args, **kwargs)
    device_bytes = getattr(runner, "kv_offload_device_bytes", None)
    return host_bytes(runner, config, shape, ranks, device_bytes)


def model_shape(runner: Any) -> ModelShape:
    """Sizes of the attention on this rank, read from the loaded model.

    Raises:
        ConfigError: the layers do not all have the same attention.
    """
    config = runner.model_config
    attentions = [layer.self_attn.attn for layer in decoder_layers(runner.model)]  # type: ignore[union-attr]
    kinds = {(a.scaling, a.logit_cap, a.sliding_window_size, a.attn_type) for a in attentions}
    if len(kinds) != 1 or attentions[0].sliding_window_size > 0:
        raise ConfigError(
            f"--model-path {config.model_path}: layers differ in scaling, logit cap or window; "
            "not supported with --kv-offload"
        )
    if runner.kv_cache_dtype != config.dtype:
        raise ConfigError(
            f"--model-path {config.model_path}: its quantisation ({config.quantization}) sets KV to "
            f"{runner.kv_cache_dtype}; --kv-offload keeps KV in the model's dtype, {config.dtype}; "
            "serve a checkpoint without KV quantisation (kv_cache_quant_algo, kv_cache_scheme)"
        )
    return ModelShape(
        num_layers=len(attentions),
        num_q_heads=attentions[0].tp_q_head_num,
        num_kv_heads=config.get_num_kv_heads(get_attention_tp_size()),
        head_dim=config.head_dim,
        page_size=runner.page_size,
        dtype=runner.kv_cache_dtype,
        scale=float(attentions[0].scaling),
        logit_cap=float(attentions[0].logit_cap or 0.0),
    )


def around_init_pools_decode(original: Callable[..., None], runner: Any) -> None:
    config, shape, ranks = parse(runner.server_args), model_shape(runner), AttentionRanks()
    num_pages = runner.max_total_num_tokens // shape.page_size + 1
    max_batch, context = runner.max_running_requests, runner.model_config.context_len
    nodes, node_cpus = nodes_of_worker(runner, config)
    plan = plan_memory(
        config,
        shape,
        num_pages=num_pages,
        max_batch=max_batch,
        context_tokens=context,
        node_cpus=node_cpus,
        device_bytes=getattr(runner, "kv_offload_device_bytes", None),
    )
    on_cpu = torch.device(runner.device).type == "cpu"
    # Looked at by all before any has taken its part.
    available = ranks.least(available_bytes())
    check_memory(plan, config, available, shared=on_cpu, ranks=ranks.size)
    if runner.max_total_num_tokens < runner.model_config.context_len:
        logger.warning(
            "host memory holds %d tokens of KV, less than one context of %d: longer requests are "
            "refused; raise --kv-offload-host-gb or --max-total-tokens",
            runner.max_total_num_tokens,
            runner.model_config.context_len,
        )
    spec = arena_sizes(config, shape, max_batch, context, len(node_cpus))
    pool = _init_pools_with(
        original,
        runner,
        functools.partial(HostKVPool, arena_spec=spec, numa_nodes=nodes),
        HostKVPool,
    )
    pool.attach(shape, plan, config.digest)


def after_prepare_for_prebuilt(_: None, batch: Any) -> None:
    """A batch of requests whose KV has arrived, or was restored after a retraction, joins."""
    from sglang_scout.plugin.backend import current_backend

    current_backend().admit(batch.reqs, batch.seq_lens_cpu.tolist())


def before_process_batch_result(processor: Any, batch: Any, result: Any) -> None:
    """A step's tokens are about to be given out."""
    from sglang_scout.plugin.backend import current_backend

    current_backend().check_results(result.copy_done)


def after_alloc_for_decode(result: Any, batch: Any, token_per_req: int) -> Any:
    """Pages for the step that is about to run have been handed out, row by row."""
    from sglang_scout.plugin.backend import current_backend

    current_backend().announce_step(batch.req_pool_indices_cpu, batch.seq_lens_cpu)
    return result


def around_can_run_graph(original: Callable[..., bool], runner: Any, forward_batch: Any) -> bool:
    """Only the step that has begun knows whether all of it was captured."""
    from sglang_scout.plugin.backend import current_backend

    if not forward_batch.forward_mode.is_decode():
        return original(runner, forward_batch)
    return current_backend().begin(forward_batch) and original(runner, forward_batch)


def around_capture_one_shape(
    original: Callable[..., None],
    runner: Any,
    size: int,
    forward: Callable[..., Any],
    stream_idx: int | None = None,
    variant_label: str | None = None,
) -> None:
    """A batch size is captured, once for each kind of step; its labels are those of SGLang's LoRA."""
    from sglang_scout.plugin.backend import current_backend

    for variant in current_backend().captures():
        original(runner, size, forward, stream_idx, variant or variant_label)


def around_resolve_variant(original: Callable[..., Any], runner: Any, forward_batch: Any) -> Any:
    """Which of a batch size's graphs is replayed; the step has begun."""
    from sglang_scout.plugin.backend import current_backend

    return current_backend().graph_variant or original(runner, forward_batch)


# Prefill server ----------------------------------------------------------------------------------


def around_profile_available_bytes_prefill(
    original: Callable[..., int], runner: Any, *args: Any, **kwargs: Any
) -> int:
    """Bytes for the KV pages of this rank: what SGLang finds, less the digests that will lie beside them."""
    available, config = original(runner, *args, **kwargs), parse(runner.server_args)
    if not config.prefill_digests:
        return available
    return bytes_beside_digests(model_shape(runner), available)


def around_init_pools_prefill(original: Callable[..., None], runner: Any) -> None:
    verify(TARGETS_OF_ROLE["prefill"])
    config: OffloadConfig = parse(runner.server_args)
    wanted = DigestKVPool if config.prefill_digests else pools_module.MHATokenToKVPool
    pool = _init_pools_with(original, runner, wanted, wanted)
    if isinstance(pool, DigestKVPool):
        pool.attach(model_shape(runner), config.digest)
        runner.token_to_kv_pool_allocator.listener = DigestListener(pool.digests)


def before_send_kv_chunk(
    scheduler: Any, req: Any, last_chunk: bool = False, end_idx: int | None = None
) -> None:
    """Digests of the full pages of this chunk, while their K is still on the device."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if not isinstance(pool, DigestKVPool):
        return
    size = pool.page_size
    end = end_idx
    if end is None:
        end = min(req.extend_range.end, len(req.origin_input_ids))
    first = req.start_send_idx // size * size
    locations = scheduler.req_to_token_pool.req_to_token[
        req.req_pool_idx, first : end // size * size : size
    ]
    pages = (locations // size).cpu().numpy().astype("int64")
    pool.digests.build(pages[~pool.digests.valid[pages]], pool.host_pages)


def before_send_kvcache(manager: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
    """A decode server without digests gets K and V only; SGLang would pair V with digests."""
    source, target = kwargs["src_data_ptrs"], kwargs["dst_data_ptrs"]
    of_kv = kwargs.get("state_type") is None and source == manager.kv_args.kv_data_ptrs
    if not of_kv:
        return (manager, *args), kwargs
    layers = num_layers(kwargs["item_lens"])
    if not carries(len(target), layers):
        raise RuntimeError(
            f"--kv-offload: {len(source)} buffers here, {len(target)} on the decode server: "
            "the two serve different models, or only one uses pipeline parallelism"
        )
    if len(source) != len(target):
        for name in ("src_data_ptrs", "item_lens", "dst_data_ptrs"):
            kwargs[name] = without_digests(kwargs[name], layers)
    return (manager, *args), kwargs


def around_send_kvcache_slice(
    original: Callable[..., int],
    manager: Any,
    session: str,
    pages: Any,
    target: list[int],
    *args: Any,
    **kwargs: Any,
) -> int:
    """A decode server of another --tp-size gets the K and V of its heads, and computes the digests.

    SGLang cuts every buffer of the list by heads as if it held K or V.
    """
    infos = manager.kv_args
    if len(set(infos.kv_item_lens)) > 1:
        layers = num_layers(infos.kv_item_lens)
        manager, infos = copy.copy(manager), copy.copy(infos)
        infos.kv_data_ptrs = without_digests(infos.kv_data_ptrs, layers)
        manager.kv_args = infos
        if carries(len(target), layers):
            target = without_digests(target, layers)
    return original(manager, session, pages, target, *args, **kwargs)


# Both --------------------------------------------------------------------------------------------


def around_batch_register(
    original: Callable[..., int], engine: Any, pointers: list[int], lengths: list[int]
) -> int:
    """SGLang goes on without memory that the transfer engine refuses; then every transfer fails.

    Raises:
        RuntimeError: the engine refused; with what may be the cause.
    """
    error = original(engine, pointers, lengths)
    if error == 0:
        return error
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.3g} MiB"
    raise RuntimeError(
        f"--kv-offload: the transfer engine does not register {len(pointers)} buffers of "
        f"{sum(lengths) / 2**30:.2f} GiB (error {error}; its own lines above name the first), so no KV could be "
        f"transferred. RDMA needs them locked: the limit on locked memory is {locked}; make it unlimited (ulimit -l, "
        "LimitMEMLOCK of a service, --ulimit memlock=-1 of a container). It needs room for them in the tables of the "
        "network device: lower --kv-offload-host-gb, or raise its limits (max_mr and max_mr_size of ibv_devinfo -v). "
        "And for what lies on a GPU (digests on a decode server, all on a prefill server) the kernel module "
        "nvidia_peermem, or a mooncake with CUDA and WITH_NVIDIA_PEERMEM=0. Without RDMA: "
        "--disaggregation-transfer-backend mooncake_tcp"
    )


def after_get_internal_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Add ``kv_offload`` to what /server_info shows."""
    if scheduler.disaggregation_mode == DisaggregationMode.DECODE:
        from sglang_scout.plugin.backend import current_backend

        state = status.decode_state_of_ranks(current_backend())
    else:
        state = status.prefill_state(scheduler)
    result.internal_state["kv_offload"] = state
    return result


def _init_pools_with(
    original: Callable[..., None], runner: Any, make_pool: Any, pool_class: type
) -> Any:
    """Build SGLang's pools with our classes in place of its own, and make sure that they were used."""
    stock = pools_module.MHATokenToKVPool, pools_module.PagedTokenToKVPoolAllocator
    pools_module.MHATokenToKVPool = make_pool
    pools_module.PagedTokenToKVPoolAllocator = ScoutAllocator
    try:
        original(runner)
    finally:
        pools_module.MHATokenToKVPool, pools_module.PagedTokenToKVPoolAllocator = stock
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    if not isinstance(pool, pool_class) or not isinstance(allocator, ScoutAllocator):
        raise RuntimeError(
            f"--kv-offload: SGLang built {type(pool).__name__} with {type(allocator).__name__}, "
            f"expected {pool_class.__name__} with {ScoutAllocator.__name__}"
        )
    assert torch.is_tensor(pool.k_buffer[0])
    return pool
