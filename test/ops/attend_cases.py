"""Inputs of attention over pages, and its oracle."""

from __future__ import annotations

import itertools

import torch

from sglang_scout.ops import native

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def densely(q, k, v, pages, last_page, last_len, scale, logit_cap=0.0):
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
        s = logit_cap * torch.tanh(s / logit_cap) if logit_cap else s
        lse[b, group], out[b, group] = s.logsumexp(1), s.softmax(1) @ values
    return out, lse


def times_of(impl, dtype):
    """Tolerance factor: on fp8 pages "native" may round weights, which changes ``out`` by 2^-8 of |V| < 5."""
    rounds = impl == "native" and dtype in FP8 and native.module.isa() == "avx512bf16"
    return 2000.0 if rounds else 1.0


def unwritten(q):
    """Buffers for out and lse, filled with NaN."""
    return torch.full(q.shape, torch.nan), torch.full(q.shape[:2], torch.nan)


def inputs(
    seed, B=3, P=7, S=8, H=2, G=3, D=64, R=5, dtype=torch.float32, spread=1.0, rounded=False,
    per_head=False,
):  # fmt: skip
    """Random inputs, with one page list per KV head if ``per_head``.

    rounded: q is exact in ``dtype``, like a model's query. Then a kernel may multiply in that dtype.
    """
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H * G, D, generator=rng) * spread
    q = q.to(dtype).float() if rounded else q
    k, v = (torch.randn(P, S, H, D, generator=rng).to(dtype) for _ in range(2))
    pages = torch.randint(-1, P, (B * H if per_head else B, R), generator=rng, dtype=torch.int32)
    last_page = torch.randint(-1, P, (B,), generator=rng, dtype=torch.int32)
    last_len = torch.randint(1, S + 1, (B,), generator=rng, dtype=torch.int32)
    return q, k, v, pages, last_page, last_len
