"""The memory of a decode server: how much it takes, and whether that fits. Asked by the server at start, and by
``sglang-scout plan``."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.engine.policy import Policy
from sglang_scout.engine.requests import hint_bytes
from sglang_scout.engine.stores import ModelShape, Sizes
from sglang_scout.worker.arena import ArenaSpec
from sglang_scout.worker.host_memory import LAST_RESORT, gib
from sglang_scout.worker.ring import layout_of, worker_memory

HEADROOM_BYTES = 256 * 2**20
"""Reserve for step buffers and the interpreters."""

MIN_PAGES = 2
"""SGLang's padding page, and one page for a request."""

_ON_DEVICE = "digests", "input buffers", "resident slots", "step buffers"
_IN_ARENA = "host pages", "kept tokens", "checksums", "ring"


@dataclass(frozen=True)
class MemoryPlan:
    """Counts and bytes of the stores, and the additional memory of CPU attention."""

    num_pages: int  # P, host pages including the padding page
    num_slots: int  # of the device per layer: resident pages, tails, and room for in-flight recalls
    budget_pages: int  # as of ServerSize
    arena: ArenaSpec = field(compare=False)  # memory that is shared with the attention process
    rows: tuple[tuple[str, int, int], ...]  # what takes memory: name, count, bytes

    def bytes_of(self, *names: str) -> int:
        return sum(nbytes for name, _, nbytes in self.rows if name in names)

    @property
    def device_rows(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(row for row in self.rows if row[0] in _ON_DEVICE)

    @property
    def device_bytes(self) -> int:
        return self.bytes_of(*_ON_DEVICE)

    @property
    def bytes_beside_pages(self) -> int:
        """Host memory other than the pages."""
        return sum(row[2] for row in self.rows) - self.bytes_of("host pages", *_ON_DEVICE)

    @property
    def arena_bytes(self) -> int:
        """Host pages, kept tokens, checksums and ring, whole pages of 2 MiB."""
        return layout_of(self.arena).total_bytes


class DeviceRoom(NamedTuple):
    """The most host pages by a device's memory, 0 if it has room for none, and the resident slots that fit besides."""

    num_pages: int
    num_slots: int


@dataclass(frozen=True)
class ServerSize:
    """A rank of a decode server for at most ``max_batch`` requests."""

    config: OffloadConfig
    policy: Policy
    shape: ModelShape
    max_batch: int
    context_tokens: int
    node_cpus: Sequence[int]  # of CPU attention, of each memory node with a part of the pages

    @property
    def page_bytes(self) -> int:
        """KV of a page in all layers."""
        return 2 * self.shape.page_bytes * self.shape.num_layers

    @property
    def budget_pages(self) -> int:
        """k, the most pages that a request can select in a layer."""
        config = self.config
        pages = min(config.budget_pages, self.context_pages)
        return max(pages, config.sink_pages + config.recent_pages)

    @property
    def context_pages(self) -> int:
        return math.ceil(self.context_tokens / self.shape.page_size)

    @property
    def step_sizes(self) -> Sizes:
        """Of the buffers for a step's selections."""
        lists = self.config.lists(self.shape.num_kv_heads)
        sizes = Sizes(self.budget_pages, 0, self.max_batch, self.context_pages, lists)
        return self.policy.step_sizes(sizes)

    @cached_property
    def step_bytes(self) -> int:
        """Device memory for pages fetched ahead, lists per KV head, and the policy's own needs."""
        shape, sizes = self.shape, self.step_sizes
        held = self.policy.device_bytes(self)
        if self.policy.route == "fetch":
            held += 4 * self.max_batch * self.budget_pages * shape.page_bytes  # K and V, two layers
        if sizes.lists > 1:
            # Candidates, their digests and scores; selections and the missing ones of them.
            rows = self.max_batch * sizes.lists
            held += 4 * rows * (3 * sizes.max_pages + 2 * shape.num_layers * sizes.budget_pages)
        return held

    @cached_property
    def worker(self) -> list[tuple[str, int, int]]:
        """Rows of the memory of CPU attention, which does not depend on the number of pages."""
        return worker_memory(self.arena(1), self.node_cpus)

    @property
    def wanted_slots(self) -> int:
        """With a budget for every request, or ``resident_tokens``."""
        tokens = self.config.resident_tokens
        of_all = self.budget_pages * self.max_batch
        return self._slots(of_all if tokens is None else tokens // self.shape.page_size)

    def _slots(self, resident: int) -> int:
        """``resident`` pages, or the minimum, tails, and room for in-flight copies."""
        forced = self.policy.forced_pages(self)
        return max(resident, forced * self.max_batch) + self.max_batch + self.budget_pages

    def arena(self, num_pages: int) -> ArenaSpec:
        config, shape = self.config, self.shape
        lists = config.lists(shape.num_kv_heads)
        return ArenaSpec(
            num_layers=shape.num_layers,
            num_pages=num_pages,
            page_size=shape.page_size,
            num_kv_heads=shape.num_kv_heads,
            num_q_heads=shape.num_q_heads,
            head_dim=shape.head_dim,
            kv_dtype=str(shape.kv_dtype).removeprefix("torch."),
            scale=shape.scale,
            max_batch=self.max_batch * lists,
            max_pages=self.policy.posted_pages(self),
            q_dtype="bfloat16" if shape.dtype == torch.bfloat16 else "float32",
            lists=lists,
            num_nodes=len(self.node_cpus),
            context_pages=int(num_pages * config.context_share) * shape.num_kv_heads,
            checksums=config.page_checksums,
        )

    @property
    def _beside_slots(self) -> tuple[int, int]:
        """Device bytes for a host page: of its digest, and of SGLang's input buffers, sized by all tokens of these."""
        return self.policy.rule.digest_bytes(self.shape), input_bytes(self.shape.page_size)

    def plan(self, num_pages: int, device_bytes: int | None = None) -> MemoryPlan:
        """Sizes of the stores.

        Args:
            device_bytes: what a device with separate memory has left for digests, input buffers and resident pages; the
                last get all the rest, but no less than the requests need, unless ``resident_tokens`` is set. None: the
                CPU device.
        """
        config, page_bytes, layers = self.config, self.page_bytes, self.shape.num_layers
        arena = self.arena(num_pages)
        digests, inputs = (num_pages * each for each in self._beside_slots)
        # With a slot for every page nothing is ever missing; more slots would stay empty.
        num_slots = min(self.wanted_slots, num_pages)
        if device_bytes is not None and config.resident_tokens is None:
            left = device_bytes - self.step_bytes - digests - inputs
            num_slots = min(max(left // page_bytes, self._slots(0)), num_pages)
        rows = (
            ("host pages", num_pages, num_pages * page_bytes),
            ("digests", num_pages, digests),
            ("input buffers", num_pages, inputs),
            ("resident slots", num_slots, num_slots * page_bytes),
            ("step buffers", 1, self.step_bytes),
            ("kept tokens", 1, int(num_pages * config.context_share) * page_bytes),
            ("salience", 1, 8 * self.shape.page_size * layers * arena.context_pages),
            ("hints", num_pages, num_pages * hint_bytes(self.policy.rule, self.shape)),
            ("checksums", num_pages, 8 * num_pages * layers * config.page_checksums),
            *self.worker,
        )
        rows = tuple(row for row in rows if row[2])
        return MemoryPlan(num_pages, num_slots, self.budget_pages, arena, rows)

    def room(self, device_bytes: int) -> DeviceRoom:
        """The most host pages whose digests fit on a device together with enough resident pages.

        Enough is a budget for every request, capped at half of the device's memory if that is above the minimum; with
        ``resident_tokens`` those. Where even the minimum exceeds the host pages, all pages are resident.
        """
        left, beside = device_bytes - self.step_bytes, sum(self._beside_slots)
        tries = [self.wanted_slots]
        if self.config.resident_tokens is None:
            half = min(self.wanted_slots, left // 2 // self.page_bytes)
            tries = [max(half, self._slots(0)), self._slots(0)]
        for slots in tries:
            pages = (left - slots * self.page_bytes) // beside
            if pages >= slots:
                return DeviceRoom(pages, slots)
        pages = max(left // (self.page_bytes + beside), 0)
        return DeviceRoom(pages, pages)


def input_bytes(tokens: int) -> int:
    """Device bytes of SGLang's buffers for all tokens of the KV pool: id, position, cache location and three positions
    of multimodal models, of 8 bytes each (``build_decode_registry``)."""
    return 6 * 8 * tokens


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number below ``limit`` that fits, as all smaller ones do; 0 if none does."""
    return bisect_left(range(1, limit), True, key=lambda number: not fits(number))


def check_memory(
    size: ServerSize,
    num_pages: int,
    available_bytes: int,
    *,
    device_bytes: int | None = None,
    in_pool: bool = False,
    shared: bool = True,
    ranks: int = 1,
) -> MemoryPlan:
    """The plan, unless it does not fit in host memory, or on the device.

    Args:
        size: of each of the tensor-parallel ``ranks`` on this machine.
        device_bytes: as of :meth:`ServerSize.plan`.
        in_pool: the arenas are in huge pages of the pool, which are not in ``available_bytes``.
        shared: it is the device's memory too.
    Raises:
        ConfigError: with what is short, and what fits.
    """

    def short_bytes(size: ServerSize, pages: int) -> tuple[int, int]:
        """Of host memory and of the device's."""
        plan = size.plan(pages, device_bytes)
        one = plan.bytes_of("hints", "salience", "partial results") + plan.device_bytes * shared
        one += HEADROOM_BYTES + (0 if in_pool else plan.arena_bytes)
        on_device = 0 if device_bytes is None else plan.device_bytes - device_bytes
        return ranks * one - available_bytes, on_device

    plan, (on_host, on_device) = size.plan(num_pages, device_bytes), short_bytes(size, num_pages)
    short = on_device if on_device > 0 else on_host
    if short <= 0:
        return plan
    fix = _what_fits(size, num_pages, ranks, lambda *of: max(short_bytes(*of)) <= 0)
    if on_device > 0:
        rows = list(plan.device_rows)
        what, there = "GPU", f"{gib(max(device_bytes or 0, 0))} are left beside the weights"
        share = math.ceil(1000 * on_device / torch.cuda.mem_get_info()[1]) / 1000
        if share < 0.1:  # SGLang's default leaves hardly more
            fix += f", or raise --mem-fraction-static by {share}"
    else:
        what, there = "host", f"{gib(available_bytes)} are available; {LAST_RESORT}"
        unasked = () if shared else plan.device_rows
        rows = [
            row for row in plan.rows if row not in unasked and not (in_pool and row[0] in _IN_ARENA)
        ]
        rows.append(("reserve", 1, HEADROOM_BYTES))
    needed = ", ".join(f"{name} {gib(nbytes)}" for name, _, nbytes in rows if nbytes >> 20)
    where = " beside the huge page pool" * in_pool + f" on each of {ranks} ranks" * (ranks > 1)
    raise ConfigError(
        f"--kv-offload {size.config.policy}: {what} memory is short by {gib(short)}; {fix}\n"
        f"  Needed{where}: {needed}. {there}"
    )


def _what_fits(
    size: ServerSize, num_pages: int, ranks: int, fits: Callable[[ServerSize, int], bool]
) -> str:
    """The largest value of a flag: fewer pages, but no less than a context, or else fewer requests."""
    pages, less = largest(num_pages, lambda pages: fits(size, pages)), ""
    if pages < (enough := min(num_pages, size.context_pages + 1)):
        of = largest(size.max_batch, lambda batch: fits(replace(size, max_batch=batch), enough))
        if not of:
            config, tokens = (
                size.config,
                (pages - 2) * size.shape.page_size,
            )  # rounding costs a page
            shorter = f"--context-length {tokens} with --kv-offload-host-gb {size.arena(1).flag_of(pages, ranks)} fits"
            kept = f" or resident_tokens ({config.resident_tokens})" * bool(config.resident_tokens)
            begin = shorter if tokens > 0 else f"lower --context-length ({size.context_tokens})"
            return f"{begin}, or lower --kv-offload-budget ({config.budget_tokens}){kept}"
        less, size = f"--max-running-requests {of}", replace(size, max_batch=of)
        pages = largest(num_pages + 1, lambda pages: fits(size, pages))
        if pages == num_pages:
            return f"{less} fits"
    return f"{less}{' with ' * bool(less)}--kv-offload-host-gb {size.arena(1).flag_of(pages, ranks)} fits"
