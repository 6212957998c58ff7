"""Size of a rank's KV pages in host memory."""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Any

from sglang_scout.core.config import DEFAULT_HOST_SHARE, OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.forecast import pilot_rank
from sglang_scout.engine.memory import (
    LEAST_PAGES,
    arena_of,
    bytes_of_step,
    most_host_pages,
    plan_worker,
)
from sglang_scout.engine.stores import ModelShape
from sglang_scout.plugin.line import adapter
from sglang_scout.plugin.ranks import AttentionRanks, nodes_of_worker
from sglang_scout.policy.base import Context, make_policy
from sglang_scout.worker import numa
from sglang_scout.worker.arena_fits import most_pages, pool_fits
from sglang_scout.worker.host_memory import LAST_RESORT, available_bytes, free_pool_bytes

logger = logging.getLogger(__name__)


def host_bytes(
    runner: Any,
    config: OffloadConfig,
    shape: ModelShape,
    ranks: AttentionRanks,
    device_bytes: int | None,
) -> int:
    """Bytes for the KV pages of this rank: its share of ``--kv-offload-host-gb``, or of the default.

    Args:
        runner: SGLang's model runner, whose pools do not exist yet.
        device_bytes: for digests and resident pages on a device with separate memory; None: the CPU device.
    """
    if config.host_gb is not None:
        size = int(config.host_gb * 2**30)
    else:
        # SGLang lowers the number once the page count is known.
        most_requests = adapter.resolved(runner.server_args).max_running_requests
        nodes, node_cpus = nodes_of_worker(runner, config)
        context = runner.model_config.context_len
        worker = plan_worker(config, shape, most_requests, context, node_cpus).total_bytes
        sizes = most_requests, context, len(node_cpus)
        available = min(available_bytes(), _bound_bytes(nodes, ranks) or available_bytes())
        of_pool = ranks.least(_bytes_in_pool(config, shape, sizes, nodes, ranks.size))
        left = ranks.least(available - ranks.size * worker)
        if max(left, of_pool) <= 0:
            raise ConfigError(
                f"--max-running-requests {most_requests}: ring and partial results of CPU attention need "
                f"{ranks.size * worker / 2**30:.2f} GiB, {-left / 2**30:.2f} more than are available; "
                f"lower it, or name fewer CPUs in --kv-offload-cpus; {LAST_RESORT}"
            )
        size = int(max(left, 0) * DEFAULT_HOST_SHARE)
        # A pool of less than half of that is somebody else's.
        size = of_pool if 2 * of_pool >= size else size
        size = int(min(size, _room_for_digests(runner, config, shape, ranks, device_bytes, size)))
        logger.info("--kv-offload-host-gb not given: %.1f GiB for KV pages", size / 2**30)
    of_pages = size // ranks.size
    page_bytes = 2 * shape.page_bytes * shape.num_layers
    if of_pages < LEAST_PAGES * page_bytes:
        given = "not given" if config.host_gb is None else format(config.host_gb, "g")
        raise ConfigError(
            f"--kv-offload-host-gb ({given}): {size / 2**30:.6f} GiB hold {of_pages // page_bytes} of the "
            f"{LEAST_PAGES} pages of {page_bytes} bytes that each rank needs; raise it, or free memory"
        )
    return of_pages


def _bytes_in_pool(
    config: OffloadConfig, shape: ModelShape, sizes: tuple[int, ...], nodes: list[int], ranks: int
) -> int:
    """Bytes of the most pages, over all ranks, with which every rank's arena is in huge pages of the pool."""
    page_bytes = 2 * shape.page_bytes * shape.num_layers
    too_large = arena_of(config, shape, free_pool_bytes() // page_bytes + 2, *sizes)
    pages = most_pages(too_large, lambda spec: pool_fits(spec, nodes, ranks))
    return ranks * max(pages - 1, 0) * page_bytes  # minus SGLang's padding page


def _room_for_digests(
    runner: Any,
    config: OffloadConfig,
    shape: ModelShape,
    ranks: AttentionRanks,
    device_bytes: int | None,
    size: int,
) -> float:
    """Host memory for the pages, of all ranks, whose digests fit on the devices besides resident pages; infinite if
    digests are in host memory. Logs it if that is less than ``size``.
    """
    if device_bytes is None:
        return math.inf
    max_batch = adapter.resolved(runner.server_args).max_running_requests
    route = make_policy(Context(config, shape.num_layers, 2 * shape.page_bytes)).route
    context_tokens = runner.model_config.context_len
    device_bytes -= bytes_of_step(config, shape, max_batch, context_tokens, route)
    room = most_host_pages(
        config,
        shape,
        max_batch=max_batch,
        context_tokens=context_tokens,
        device_bytes=device_bytes,
        pilot_rank=pilot_rank(config),
    )
    least = ranks.least(room.num_pages)
    if least < LEAST_PAGES + 1:
        raise ConfigError(
            f"--kv-offload {config.policy}: the {device_bytes / 2**30:.2f} GiB of device memory left for digests and "
            f"resident pages hold {least} of the {LEAST_PAGES + 1} pages that each rank needs; "
            "raise --mem-fraction-static"
        )
    page_bytes = 2 * shape.page_bytes * shape.num_layers
    of_digests = ranks.size * (least - 1) * page_bytes  # minus SGLang's padding page
    if of_digests >= size:
        return of_digests
    few = room.num_slots < room.wanted_slots
    logger.log(
        logging.WARNING if few else logging.INFO,
        "--kv-offload-host-gb not given: limited to %.1f GiB of KV pages, whose digests fit on the device beside %d "
        "resident slots%s",
        of_digests / 2**30,
        room.num_slots,
        f"; a budget for each of --max-running-requests {max_batch} would need {room.wanted_slots}: lower that flag, "
        "or raise --mem-fraction-static"
        if few
        else "",
    )
    return of_digests


def _bound_bytes(nodes: list[int], ranks: AttentionRanks) -> int | None:
    """Memory of the NUMA nodes that this rank's pages are bound to, as if all ranks had as much; None if pages are not
    bound. A node that several ranks' pages are bound to is divided among them."""
    bound_to = ranks.gather(nodes) if ranks.size > 1 else [nodes]
    if len(numa.nodes()) <= 1 or not nodes:
        return None
    free = {node: numa.available_bytes(node) for node in nodes}
    if None in free.values():
        return None
    users = Counter(node for of_rank in bound_to for node in of_rank)
    return ranks.size * sum((free[node] or 0) // users[node] for node in nodes)
