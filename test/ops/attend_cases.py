"""Inputs of attention over pages, and its oracle."""

from __future__ import annotations

import itertools

import torch

from implementations import name_of
from sglang_scout import _native
from sglang_scout.ops.attend import attend_pages

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def densely(q, k, v, pages, last_page, last_len, scale):
    """Oracle: softmax over the tokens written out, in float64, KV head by KV head."""
    (B, HQ, _), (S, H) = q.shape, k.shape[1:3]
    C, G = len(pages) // B, HQ // H
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((B, HQ), -torch.inf, dtype=torch.float64)
    for b, h in itertools.product(range(B), range(H)):
        parts = [(page, S) for page in pages[b * C + h % C].tolist() if page >= 0]
        if last_page is not None and last_page[b] >= 0:
            parts.append((int(last_page[b]), int(last_len[b])))
        if not parts:
            continue
        keys, values = (torch.cat([x[page, :n, h] for page, n in parts]).double() for x in (k, v))
        group = slice(h * G, h * G + G)
        s = q[b, group].double() @ keys.T * scale  # [G, T]
        lse[b, group], out[b, group] = s.logsumexp(1), s.softmax(1) @ values
    return out, lse


def agrees(agree, impl, got, call, times=1.0):
    """``got`` of an implementation that may round softmax weights to bf16: ``out`` by at most what `attend_pages` says.

    call: q, k, v, pages, last_page, last_len and scale.
    """
    (out, lse), (q, k, v, *rest) = densely(*call), call
    by_kernel = q.dtype == torch.bfloat16 and v.dtype in (torch.bfloat16, *FP8)
    by_cpu = v.dtype in FP8 and _native.isa() == "avx512bf16"
    rounds = {"triton": by_kernel, "native": by_cpu}.get(name_of(impl), False)
    rounding = rounds * 2.0**-8 * densely(q, k, v.float().abs(), *rest)[0]
    gap = got[0].double() - out
    gap -= gap.clamp(-rounding, rounding)
    agree(attend_pages, (out + gap, got[1]), (out, lse), v.dtype, times)


def inputs(
    seed, B=3, P=7, S=8, H=2, G=3, D=64, R=5, dtype=torch.float32, spread=1.0, rounded=False,
    per_head=False,
):  # fmt: skip
    """Random inputs, with one page list per KV head if ``per_head``.

    rounded: q is exact in ``dtype``, like a model's query, and of that dtype unless it is fp8.
    """
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H * G, D, generator=rng) * spread
    if rounded:
        q = q.to(dtype).to(torch.bfloat16 if dtype in FP8 else dtype)
    k, v = (torch.randn(P, S, H, D, generator=rng).to(dtype) for _ in range(2))
    pages = torch.randint(-1, P, (B * H if per_head else B, R), generator=rng, dtype=torch.int32)
    last_page = torch.randint(-1, P, (B,), generator=rng, dtype=torch.int32)
    last_len = torch.randint(1, S + 1, (B,), generator=rng, dtype=torch.int32)
    last_len[last_page < 0] = 999  # says nothing
    return q, k, v, pages, last_page, last_len
