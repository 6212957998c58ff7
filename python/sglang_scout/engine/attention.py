"""Selects the attention implementation on the device: as configured, else the fastest at the engine's own sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sglang_scout.core.config import FLAGS
from sglang_scout.core.errors import ConfigError
from sglang_scout.engine.stores import ModelShape, Sizes
from sglang_scout.ops.attend import Attend, attend_pages
from sglang_scout.ops.op import Tolerance
from sglang_scout.policy.base import Policy

logger = logging.getLogger(__name__)

_POOL_PAGES = 1024  # 128 MiB of 8 heads of 128 in bf16, more than an L2 cache holds
_CALLS = 20  # each reads different pages
_SAME = Tolerance(2**-7, 2**-7, "one may round its result to bf16")


def attention_by(
    kernel: str, policy: Policy, shape: ModelShape, sizes: Sizes, device: torch.device
) -> Attend:
    """:func:`attend_pages` by ``kernel``; "auto" on a CUDA device: the fastest of those that can run and agree.

    Raises:
        ConfigError: the named one cannot run.
    """
    chooses = policy.feedback is None and policy.rule.only_selected
    lists = sizes.lists if chooses else 1
    reasons = attend_pages.reasons(*_calls(shape, 1, lists, 1, 0, device)[0])
    if found := "; ".join(reasons.get(kernel, [])):
        raise ConfigError(
            f"{FLAGS['config']}: attend_kernel = {kernel!r} cannot run with {FLAGS['policy']} {policy.name} (C={lists} "
            f"page lists per request) and KV in {str(shape.kv_dtype).removeprefix('torch.')}: {found}; drop the key "
            "to use a kernel that can run"
        )
    able = [other for other, why in reasons.items() if not why]
    time_us = _TIMES.get(device.type)
    if kernel == "auto" and time_us and len(able) > 1:
        columns = sizes.budget_pages if chooses else sizes.num_slots // sizes.max_batch
        calls = _calls(shape, sizes.max_batch, lists, max(columns, 1), _POOL_PAGES, device)
        kernel = fastest(able, calls, time_us)
    return partial(attend_pages, impl=kernel)


def _calls(
    shape: ModelShape, batch: int, lists: int, columns: int, pool_pages: int, device: torch.device
) -> list[list[Any]]:
    """Arguments of calls in a full batch: every request attends to ``columns`` random pages of a pool."""
    generator = torch.Generator().manual_seed(0)  # the global one is SGLang's

    def noise(*of: int) -> torch.Tensor:
        return torch.randn(*of, generator=generator).to(device, shape.dtype)

    q = noise(batch, shape.num_q_heads, shape.head_dim)
    pool = pool_pages, shape.page_size, shape.num_kv_heads, shape.head_dim
    k, v = (noise(*pool).to(shape.kv_dtype) for _ in range(2))
    tables = torch.randint(
        max(pool_pages, 1), (_CALLS, batch * lists, columns), generator=generator, dtype=torch.int32
    )
    return [[q, k, v, pages, None, None, shape.scale] for pages in tables.to(device)]


def fastest(
    names: Sequence[str],
    calls: Sequence[Sequence[Any]],
    time_us: Callable[[Sequence[Callable[[], Any]]], float],
) -> str:
    """The fastest implementation of :func:`attend_pages` by ``time_us`` over ``calls``, the arguments of each; the
    results of all must agree with the first's."""
    right, times = None, {}
    for name in names:
        runs = [partial(attend_pages, *arguments, impl=name) for arguments in calls]
        try:
            result = runs[0]()
            right = right or result
            pairs = zip(result, right, strict=True)
            wrong = "".join(_SAME.mismatch(ours.float(), theirs) for ours, theirs in pairs)
            if not wrong:
                times[name] = time_us(runs)
        except Exception as error:  # from a library that may be untested on this device
            wrong = f"{type(error).__name__}: {error}"
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a sticky error aborts the start
        if wrong:
            logger.warning("attention kernel %s is not used: %s", name, wrong)
    chosen = min(times, key=times.__getitem__, default=names[0])
    figures = ", ".join(f"{name} {us:.0f} us" for name, us in times.items())
    what = "attention kernel on the device: %s; time per layer in a full batch: %s"
    logger.info(what, chosen, figures)
    return chosen


def graph_time_us(runs: Sequence[Callable[[], Any]]) -> float:
    """Time of a call inside a captured graph: without launch overhead on the host."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for run in runs:
                run()
    finally:
        torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / len(runs)


_TIMES = {"cuda": graph_time_us}
"""Timing function by device type; on other types the first usable implementation is taken."""
