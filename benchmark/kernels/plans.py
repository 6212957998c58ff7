"""The shapes of benchmark/kernels/cpu_attention.py, and what a full and a quick run cover."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Plan:
    """What a run covers and how long it may take.

    Attributes:
        models: names, H, G, D.
        sizes: (batch, pages) of each model.
        sizes_4k: the same, on a pool of 4 KiB pages.
        pool_bytes: of a pool, K and V.
        budget_s: for measuring; samples are as many as fit, a shape that would begin later is skipped.
        max_call_s: an implementation that would need longer for one call is skipped.
        first: of ``sizes``, those to begin with.
        all_isas: of the ``first`` sizes, lower instruction sets with each thread count. Otherwise they run with
            all threads only.
    """

    models: tuple[tuple[str, int, int, int], ...]
    sizes: tuple[tuple[int, int], ...]
    sizes_4k: tuple[tuple[int, int], ...]
    pool_bytes: int
    budget_s: float
    max_call_s: float
    all_isas: bool = True
    first: tuple[tuple[int, int], ...] = ((16, 64), (64, 64))


MODELS = (  # names, H, G, D
    ("Qwen3-8B, Llama-3.1-8B", 8, 4, 128),
    ("Qwen3-14B", 8, 5, 128),
    ("LLaMA-2-7B (MHA)", 32, 1, 128),
    ("Qwen3-32B, Llama-3.1-70B", 8, 8, 128),
)
FULL = Plan(
    models=MODELS,
    sizes=tuple((b, r) for r in (8, 64, 512) for b in (1, 16, 64)),
    sizes_4k=((16, 64),),
    pool_bytes=2 << 30,
    budget_s=420.0,
    max_call_s=2.0,
)
QUICK = Plan(
    models=MODELS[:3],
    sizes=((1, 8), (16, 64)),
    sizes_4k=(),
    pool_bytes=1 << 29,
    budget_s=30.0,
    max_call_s=1.0,
    all_isas=False,
)
SMOKE = Plan(
    models=MODELS[1:2],
    sizes=((2, 4),),
    sizes_4k=((2, 4),),
    pool_bytes=1 << 26,
    budget_s=3.0,
    max_call_s=1.0,
    all_isas=False,
)
