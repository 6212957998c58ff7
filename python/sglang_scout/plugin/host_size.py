"""Size of a rank's KV pages in host memory."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from sglang_scout.core.config import DEFAULT_HOST_SHARE, OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.forecast import pilot_rank
from sglang_scout.engine.memory import LEAST_PAGES, ServerSize
from sglang_scout.engine.stores import ModelShape
from sglang_scout.plugin.ranks import AttentionRanks, nodes_of_worker
from sglang_scout.plugin.release import adapter
from sglang_scout.policy.base import Context, make_policy
from sglang_scout.worker import host_memory, numa
from sglang_scout.worker.arena_fits import pool
from sglang_scout.worker.host_memory import LAST_RESORT

logger = logging.getLogger(__name__)


def size_of(
    runner: Any, config: OffloadConfig, shape: ModelShape, max_batch: int
) -> tuple[ServerSize, list[int]]:
    """What this rank's memory follows from, and the NUMA nodes that its pages are bound to."""
    nodes, node_cpus = nodes_of_worker(runner, config)
    route = make_policy(Context(config, shape.num_layers, 2 * shape.page_bytes)).route
    context, rank = runner.model_config.context_len, pilot_rank(config)
    return ServerSize(config, shape, max_batch, context, node_cpus, route, rank), nodes


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
        total = int(config.host_gb * 2**30)
    else:
        # SGLang lowers the number once the page count is known.
        most_requests = adapter.resolved(runner.server_args).max_running_requests
        size, nodes = size_of(runner, config, shape, most_requests)
        total = default_bytes(size, nodes, ranks, device_bytes)
        logger.info("--kv-offload-host-gb not given: %.1f GiB for KV pages", total / 2**30)
    of_pages, page_bytes = total // ranks.size, 2 * shape.page_bytes * shape.num_layers
    if of_pages < LEAST_PAGES * page_bytes:
        given = "not given" if config.host_gb is None else format(config.host_gb, "g")
        raise ConfigError(
            f"--kv-offload-host-gb ({given}): {total / 2**30:.6f} GiB hold {of_pages // page_bytes} of the "
            f"{LEAST_PAGES} pages of {page_bytes} bytes that each rank needs; raise it, or free memory"
        )
    return of_pages


def default_bytes(
    size: ServerSize, nodes: list[int], ranks: AttentionRanks, device_bytes: int | None
) -> int:
    """For the KV pages of all ranks: a share of what CPU attention leaves of host memory, or the pool of huge pages;
    no more than have room for their digests on the devices."""
    worker = ranks.size * size.worker.total_bytes
    # The most pages with which every rank's arena is in the pool.
    place = pool(nodes, ranks.size)
    in_pool = place.most_pages(size.arena(place.free_bytes(None) // size.page_bytes + 2))
    of_pool = ranks.least(_bytes_of(size, ranks, in_pool))
    left = ranks.least(_available_bytes(nodes, ranks) - worker)
    if max(left, of_pool) <= 0:
        raise ConfigError(
            f"--max-running-requests {size.max_batch}: ring and partial results of CPU attention need "
            f"{worker / 2**30:.2f} GiB, {-left / 2**30:.2f} more than are available; "
            f"lower it, or name fewer CPUs in --kv-offload-cpus; {LAST_RESORT}"
        )
    total = int(max(left, 0) * DEFAULT_HOST_SHARE)
    # A pool of less than half of that is somebody else's.
    total = of_pool if 2 * of_pool >= total else total
    return total if device_bytes is None else _with_digests(size, ranks, device_bytes, total)


def _bytes_of(size: ServerSize, ranks: AttentionRanks, num_pages: int) -> int:
    """KV of all ranks, without SGLang's padding page."""
    return ranks.size * max(num_pages - 1, 0) * size.page_bytes


def _with_digests(size: ServerSize, ranks: AttentionRanks, device_bytes: int, total: int) -> int:
    """``total``, or less: the KV of the pages whose digests fit on the devices besides resident pages."""
    room = size.room(device_bytes)
    least = ranks.least(room.num_pages)
    if least < LEAST_PAGES + 1:
        left = device_bytes - size.step_bytes
        raise ConfigError(
            f"--kv-offload {size.config.policy}: the {left / 2**30:.2f} GiB of device memory left for digests and "
            f"resident pages hold {least} of the {LEAST_PAGES + 1} pages that each rank needs; "
            "raise --mem-fraction-static"
        )
    of_digests = _bytes_of(size, ranks, least)
    if of_digests >= total:
        return total
    few = room.num_slots < size.wanted_slots
    logger.log(
        logging.WARNING if few else logging.INFO,
        "--kv-offload-host-gb not given: limited to %.1f GiB of KV pages, whose digests fit on the device beside %d "
        "resident slots%s",
        of_digests / 2**30,
        room.num_slots,
        f"; a budget for each of --max-running-requests {size.max_batch} would need {size.wanted_slots}: lower that "
        "flag, or raise --mem-fraction-static"
        if few
        else "",
    )
    return of_digests


def _available_bytes(nodes: list[int], ranks: AttentionRanks) -> int:
    """Memory that this rank's pages can have, as if all ranks had as much: of the NUMA nodes that they are bound to, if
    any. A node that several ranks' pages are bound to is divided among them."""
    bound_to = ranks.gather(nodes) if ranks.size > 1 else [nodes]
    available = host_memory.available_bytes()
    if len(numa.nodes()) <= 1 or not nodes:
        return available
    users = Counter(node for of_rank in bound_to for node in of_rank)
    of_nodes = (host_memory.available_bytes(node) // users[node] for node in nodes)
    return min(available, ranks.size * sum(of_nodes))
