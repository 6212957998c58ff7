"""The memory plan of the stores, made once at start and refused if it does not fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.page_bytes import PILOT_RANK, digest_bytes, input_bytes
from sglang_scout.engine.hints import hint_bytes
from sglang_scout.engine.stores import ModelShape
from sglang_scout.engine.transport import staging_bytes
from sglang_scout.policy.base import Route
from sglang_scout.worker.arena import ArenaSpec
from sglang_scout.worker.host_memory import LAST_RESORT, flag_gib
from sglang_scout.worker.ring import WorkerMemory, layout_of, worker_memory

HEADROOM_BYTES = 256 * 2**20
"""Reserve for step buffers and the interpreters."""

LEAST_PAGES = 2
"""SGLang's padding page, and one page for a request."""


@dataclass(frozen=True)
class MemoryPlan:
    """Counts and bytes of the three stores, and the additional memory of CPU attention.

    Attributes:
        num_pages: P, host pages including the padding page.
        budget_pages: k, at most the pages of one context.
        num_slots: device slots per layer: resident pages, tails, and room for in-flight recalls.
        input_bytes: SGLang's input buffers, sized by all tokens of the host pages.
        step_bytes: as of :func:`bytes_of_step`.
        context_bytes: kept tokens of older pages, in host memory.
        hint_bytes: prompts' hints, in host memory.
        checksum_bytes: of the host pages, in host memory.
        arena: sizes of the memory that is shared with the attention process.
    """

    num_pages: int
    budget_pages: int
    num_slots: int
    host_bytes: int
    digest_bytes: int
    input_bytes: int
    resident_bytes: int
    worker: WorkerMemory
    arena: ArenaSpec = field(compare=False)
    step_bytes: int = 0
    context_bytes: int = 0
    hint_bytes: int = 0
    checksum_bytes: int = 0

    @property
    def rows(self) -> tuple[tuple[str, int, int], ...]:
        """(what, count, bytes) for a table."""
        return (
            ("host pages", self.num_pages, self.host_bytes),
            *self.device_rows,
            *([("kept tokens", 1, self.context_bytes)] if self.context_bytes else []),
            *([("hints", self.num_pages, self.hint_bytes)] if self.hint_bytes else []),
            *([("checksums", self.num_pages, self.checksum_bytes)] if self.checksum_bytes else []),
            *self.worker.rows,
        )

    @property
    def device_rows(self) -> tuple[tuple[str, int, int], ...]:
        """The rows of device memory."""
        return (
            ("digests", self.num_pages, self.digest_bytes),
            ("input buffers", self.num_pages, self.input_bytes),
            ("resident slots", self.num_slots, self.resident_bytes),
            *([("step buffers", 1, self.step_bytes)] if self.step_bytes else []),
        )

    @property
    def device_bytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.device_rows)

    @property
    def bytes_beside_pages(self) -> int:
        """Host memory other than the pages."""
        own = self.context_bytes + self.hint_bytes + self.checksum_bytes
        return own + self.worker.total_bytes

    @property
    def arena_bytes(self) -> int:
        """Host pages, kept tokens, checksums and ring, whole pages of 2 MiB."""
        return layout_of(self.arena).total_bytes


def plan_memory(
    config: OffloadConfig,
    shape: ModelShape,
    *,
    num_pages: int,
    max_batch: int,
    context_tokens: int,
    node_cpus: Sequence[int],
    device_bytes: int | None = None,
    route: Route = "cpu",
    pilot_rank: int = PILOT_RANK,
) -> MemoryPlan:
    """Sizes of the stores for ``num_pages`` host pages and at most ``max_batch`` requests.

    Args:
        node_cpus: CPUs of CPU attention on each memory node that the pages are divided among.
        device_bytes: what a device with separate memory has left for digests, input buffers and resident pages; the
            last get all the rest unless ``resident_tokens`` is set. None: the CPU device.
        route: of missing pages, see ``policy/base.py``.
        pilot_rank: of the weights that compute digests, if any.
    Raises:
        ConfigError: they do not fit; with the numbers.
    """
    size = shape.page_size
    arena = arena_of(config, shape, num_pages, max_batch, context_tokens, len(node_cpus))
    budget_pages = most_pages(config, shape, context_tokens)
    of_step = bytes_of_step(config, shape, max_batch, context_tokens, route)
    if device_bytes is not None:
        device_bytes -= of_step
    page_bytes = 2 * shape.page_bytes * shape.num_layers
    on_digests, on_inputs = (
        num_pages * _digest_bytes(shape, config.digest, pilot_rank),
        num_pages * input_bytes(size),
    )
    least_slots = _least_slots(config, max_batch, budget_pages)
    if config.resident_tokens is not None or device_bytes is None:
        resident = config.resident_tokens or config.budget_tokens * max_batch
        num_slots = _least_slots(config, max_batch, budget_pages, resident // size)
    else:
        num_slots = max(device_bytes - on_digests - on_inputs, 0) // page_bytes
    # With a slot for every page nothing is ever missing; more slots would stay empty.
    num_slots = min(num_slots, num_pages)
    plan = MemoryPlan(
        num_pages=num_pages,
        budget_pages=budget_pages,
        num_slots=num_slots,
        host_bytes=num_pages * page_bytes,
        digest_bytes=on_digests,
        input_bytes=on_inputs,
        resident_bytes=num_slots * page_bytes,
        worker=worker_memory(arena, config.worker_threads_per_group, node_cpus),
        arena=arena,
        step_bytes=of_step,
        context_bytes=int(num_pages * config.context_share) * page_bytes,
        hint_bytes=num_pages * hint_bytes(config, shape.num_layers),
        checksum_bytes=8 * num_pages * shape.num_layers * config.page_checksums,
    )
    if device_bytes is not None:
        _check_device(plan, config, max_batch, min(least_slots, num_pages), device_bytes)
    return plan


def bytes_of_step(
    config: OffloadConfig, shape: ModelShape, max_batch: int, context_tokens: int, route: Route
) -> int:
    """Device memory for pages fetched ahead, for lists per KV head, for the moving averages of window tokens, and for
    the coordinates of calibrated digests."""
    listed = -(-context_tokens // shape.page_size)
    rows = max_batch * config.lists(shape.num_kv_heads)
    if config.context_share:  # moving averages; lists and queries for the worker
        queries = max_batch * shape.num_q_heads * shape.head_dim
        return 4 * shape.num_layers * (rows * (config.budget_tokens + listed) + queries)
    chosen = most_pages(config, shape, context_tokens)
    held = staging_bytes(shape, max_batch, chosen) if route == "fetch" else 0
    if config.digest == "calibrated":
        D = shape.head_dim
        held += 4 * shape.num_layers * shape.num_kv_heads * (2 * D * D + 4 * D)
    if rows == max_batch:
        return held
    # Candidates, their digests and scores; selections and the missing ones of them.
    return held + 4 * rows * (3 * listed + 2 * shape.num_layers * chosen)


@dataclass(frozen=True)
class DeviceRoom:
    """What a device with separate memory has room for.

    Attributes:
        num_pages: the most host pages, by their digests and tokens; 0 if it has room for none.
        num_slots: resident slots that fit besides.
        wanted_slots: with a budget for every request, or ``resident_tokens``.
    """

    num_pages: int
    num_slots: int
    wanted_slots: int


def most_host_pages(
    config: OffloadConfig,
    shape: ModelShape,
    *,
    max_batch: int,
    context_tokens: int,
    device_bytes: int,
    pilot_rank: int = PILOT_RANK,
) -> DeviceRoom:
    """The most host pages whose digests fit on a device together with enough resident pages.

    Enough is a budget for every request, capped at half of the device's memory if that is above the minimum; with
    ``resident_tokens`` those. If not even the minimum leaves room for as many host pages, there are as many as can all
    be resident.
    """
    page_bytes = 2 * shape.page_bytes * shape.num_layers
    beside = _digest_bytes(shape, config.digest, pilot_rank) + input_bytes(shape.page_size)
    budget_pages = most_pages(config, shape, context_tokens)
    least = _least_slots(config, max_batch, budget_pages)
    if config.resident_tokens is None:
        wanted = _least_slots(config, max_batch, budget_pages, budget_pages * max_batch)
        tries = [max(min(wanted, device_bytes // 2 // page_bytes), least), least]
    else:
        resident = config.resident_tokens // shape.page_size
        wanted = _least_slots(config, max_batch, budget_pages, resident)
        tries = [wanted]
    for slots in tries:
        pages = (device_bytes - slots * page_bytes) // beside
        if pages >= slots:
            return DeviceRoom(pages, slots, wanted)
    pages = max(device_bytes // (page_bytes + beside), 0)
    return DeviceRoom(pages, pages, wanted)


def _least_slots(
    config: OffloadConfig, max_batch: int, budget_pages: int, resident: int = 0
) -> int:
    """``resident`` pages, or the minimum, tails, and room for in-flight copies."""
    forced = config.sink_pages + config.recent_pages
    if config.context_share:  # a window of the whole budget
        forced = budget_pages
    return max(resident, forced * max_batch) + max_batch + budget_pages


def most_pages(config: OffloadConfig, shape: ModelShape, context_tokens: int) -> int:
    """k, the most pages that a request can select in a layer."""
    pages = min(config.budget_pages, -(-context_tokens // shape.page_size))
    return max(pages, config.sink_pages + config.recent_pages)


def arena_sizes(
    config: OffloadConfig,
    shape: ModelShape,
    max_batch: int,
    context_tokens: int,
    num_nodes: int,
) -> dict[str, Any]:
    """Fields of :class:`ArenaSpec`, all but the numbers of pages, for ``max_batch`` requests."""
    listed = most_pages(config, shape, context_tokens)
    if config.context_share:  # before its evaluation a request keeps all its tokens
        listed = -(-context_tokens // shape.page_size)
    lists = config.lists(shape.num_kv_heads)
    dtype = str(shape.dtype).removeprefix("torch.")
    return {
        "num_nodes": num_nodes,
        "num_layers": shape.num_layers,
        "page_size": shape.page_size,
        "num_kv_heads": shape.num_kv_heads,
        "num_q_heads": shape.num_q_heads,
        "head_dim": shape.head_dim,
        "kv_dtype": str(shape.kv_dtype).removeprefix("torch."),
        "q_dtype": "bfloat16" if dtype == "bfloat16" else "float32",
        "scale": shape.scale,
        "max_batch": max_batch * lists,
        "lists": lists,
        "max_pages": listed,
        "checksums": config.page_checksums,
    }


def arena_of(config: OffloadConfig, shape: ModelShape, num_pages: int, *sizes: int) -> ArenaSpec:
    """The arena of so many host pages; ``sizes``: the other arguments of :func:`arena_sizes`."""
    context_pages = int(num_pages * config.context_share) * shape.num_kv_heads
    fields = arena_sizes(config, shape, *sizes)
    return ArenaSpec(num_pages=num_pages, context_pages=context_pages, **fields)


def plan_worker(
    config: OffloadConfig,
    shape: ModelShape,
    max_batch: int,
    context_tokens: int,
    node_cpus: Sequence[int],
) -> WorkerMemory:
    """Memory of CPU attention that does not depend on the number of pages; arguments as of :func:`plan_memory`."""
    spec = arena_of(config, shape, 1, max_batch, context_tokens, len(node_cpus))
    return worker_memory(spec, config.worker_threads_per_group, node_cpus)


def _check_device(
    plan: MemoryPlan,
    config: OffloadConfig,
    max_batch: int,
    least_slots: int,
    device_bytes: int,
) -> None:
    slot_bytes = plan.host_bytes // plan.num_pages
    needed = plan.digest_bytes + plan.input_bytes + max(plan.num_slots, least_slots) * slot_bytes
    if needed <= device_bytes:
        return
    raise ConfigError(
        f"--kv-offload {config.policy}: needs {needed / 2**30:.2f} GiB of device memory "
        f"({plan.digest_bytes / 2**30:.2f} GiB for the digests of {plan.num_pages} host pages, "
        f"{plan.input_bytes / 2**30:.2f} GiB for SGLang's input buffers of their tokens, and "
        f"{max(plan.num_slots, least_slots)} resident pages, of which {max_batch} requests need at least "
        f"{least_slots}), but only {device_bytes / 2**30:.2f} GiB are left; lower --kv-offload-host-gb, "
        f"--max-running-requests ({max_batch}), --kv-offload-budget ({config.budget_tokens}) or resident_tokens "
        f"({config.resident_tokens}), or raise --mem-fraction-static"
    )


def _digest_bytes(shape: ModelShape, kind: str, pilot_rank: int) -> int:
    """Bytes of one page, over all layers."""
    sizes = shape.num_kv_heads, shape.head_dim, shape.dtype.itemsize
    return shape.num_layers * digest_bytes(kind, *sizes, pilot_rank)


def bytes_beside_digests(
    shape: ModelShape, kind: str, nbytes: int, pilot_rank: int = PILOT_RANK
) -> int:
    """What is left of ``nbytes`` for pages if each needs a digest as well."""
    page_bytes = 2 * shape.page_bytes * shape.num_layers
    return nbytes * page_bytes // (page_bytes + _digest_bytes(shape, kind, pilot_rank))


def check_memory(
    plan_of: Callable[[int], MemoryPlan],
    num_pages: int,
    config: OffloadConfig,
    available_bytes: int,
    *,
    in_pool: bool = False,
    shared: bool = True,
    ranks: int = 1,
) -> MemoryPlan:
    """The plan, unless it does not fit in host memory.

    Args:
        plan_of: the plan of so many host pages, for each of the tensor-parallel ``ranks`` on this machine.
        in_pool: the arenas are in huge pages of the pool, which are not in ``available_bytes``.
        shared: it is the device's memory too.
    Raises:
        ConfigError: with what is short, and what fits.
    """

    def needed(pages: int) -> int:
        plan = plan_of(pages)
        one = plan.hint_bytes + plan.worker.partial_bytes + (plan.device_bytes if shared else 0)
        return ranks * (one + HEADROOM_BYTES + (0 if in_pool else plan.arena_bytes))

    plan, wanted = plan_of(num_pages), needed(num_pages)
    if wanted <= available_bytes:
        return plan
    fitting = bisect_right(range(1, num_pages), available_bytes, key=needed)
    if fitting > LEAST_PAGES:
        of_pages = plan.host_bytes // num_pages * (fitting - 1)
        fix = f"--kv-offload-host-gb {flag_gib(ranks * of_pages)} fits"
    else:
        what, _, nbytes = max(plan_of(LEAST_PAGES + 1).rows, key=lambda row: row[2])
        fix = (
            f"no --kv-offload-host-gb fits: {nbytes / 2**30:.2f} GiB are needed for the {what} alone; lower "
            f"--max-running-requests ({plan.worker.max_batch})"
        )
    parts = ", ".join(f"{what} {size / 2**30:.2f} GiB" for what, _, size in plan.rows)
    raise ConfigError(
        f"--kv-offload {config.policy}: host memory is short by {(wanted - available_bytes) / 2**30:.2f} GiB; {fix}. "
        f"{wanted / 2**30:.2f} GiB are needed{' beside the huge page pool' if in_pool else ''} ({parts}"
        f"{f' on each of {ranks} ranks' if ranks > 1 else ''}), but {available_bytes / 2**30:.2f} GiB are available; "
        f"{LAST_RESORT}"
    )
