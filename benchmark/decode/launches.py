"""Kernel launches of a decode step, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmark import rows


def of_layer(kernels: Iterable[Any], layers: int) -> dict[str, list[float]]:
    """Launches and us per layer of each kernel, from the profiler's averages."""
    return {
        e.key: [e.count / layers, round(e.self_device_time_total / layers, 3)]
        for e in kernels
        if e.self_device_time_total > 0
    }


def add_profile(
    writer: rows.Writer, step: Callable[[], None], layers: int, about: dict[str, Any]
) -> None:
    """Adds a row with the launches of one step, by kernel."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        kernels = of_layer(seen.key_averages(), layers)
        if not kernels:
            raise RuntimeError("the profiler saw no kernel")
        launches = round(sum(n for n, _ in kernels.values()), 2)
        writer.add("profile", untimed=True, launches_per_layer=launches, kernels=kernels, **about)
        print(f"profile: {launches} launches a layer", flush=True)
    except Exception as error:  # not every image permits profiling
        writer.add("profile", "failed", f"{type(error).__name__}: {error}"[:500], **about)
