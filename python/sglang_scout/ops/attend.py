"""Attention of one decode step over a set of pages, with its log-sum-exp, and the merge of two such parts."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from .. import _native
from . import triton as kernels
from .pages import resident_slots


def attend_pages(
    q: Float[Tensor, "B HQ D"],
    k: Float[Tensor, "P S H D"],
    v: Float[Tensor, "P S H D"],
    pages: Int32[Tensor, "BC R"],
    last_page: Int32[Tensor, " B"] | None,
    last_len: Int32[Tensor, " B"] | None,
    scale: float,
    slot_of: Int32[Tensor, " I"] | None = None,
    n_pages: Int32[Tensor, " BC"] | None = None,
) -> tuple[Float32[Tensor, "B HQ D"], Float32[Tensor, "B HQ"]]:
    """Attend from one query per request to all tokens of the given pages.

    s = scale q.K, lse = log sum e^s, out = sum e^(s - lse) V: FlashAttention-2 section 3.1.

    Args:
        q, k: after RoPE; query head h uses KV head h // (HQ / H). C++ and Triton read the NaN of e4m3 as 480.
        pages: below P; negative entries, at any position, are skipped. C is 1, or H: then row b * H + h is the page
            list of KV head h of request b.
        last_page, last_len: one more page (negative: none) for all heads, of which only the first last_len (1..S)
            tokens are used.
        slot_of: below P; if given, ``pages`` are logical ids below I, and page i is at slot_of[i] of the pool. Pages
            with a negative slot are skipped, by Triton also ids beyond I. Does not apply to ``last_page``.
        n_pages: all of a row's ``pages`` from there on are negative, so that a wide table costs a short request
            nothing. Implementations may ignore it.
    Returns:
        (out, lse), natural logarithm. Softmax weights are rounded to bf16 by Triton if q is bf16 and pages are bf16 or
        fp8, and by C++ if pages are fp8, q is exact in bf16 and the CPU has AVX-512 BF16 and VBMI: ``out`` then differs
        by up to 2^-8 of the weighted mean of |V|, lse not at all. An empty set gives out = 0, lse = -inf; so do keys
        for which every score is -inf (Triton gives NaN: it splits floats into parts, which inf does not survive).
    Source: ScoutAttention Algorithm 1 lines 7 and 10 (CPUATTN, GPUATTN).
    """
    run = kernels.attend.attend_pages if q.is_cuda else _attend_pages_native
    return run(q, k, v, pages, last_page, last_len, scale, slot_of, n_pages)


def attend_pages_reference(q, k, v, pages, last_page, last_len, scale, slot_of=None, n_pages=None):
    (B, HQ, D), (S, H) = q.shape, k.shape[1:3]
    C = len(pages) // B if B else 1  # lists per request
    pages = resident_slots(slot_of, pages).reshape(B, C, pages.shape[1])
    lengths = torch.full_like(pages, S)
    if last_page is not None and last_len is not None:
        pages = torch.cat((pages, last_page[:, None, None].expand(B, C, 1)), dim=2)
        lengths = torch.cat((lengths, last_len[:, None, None].expand(B, C, 1)), dim=2)
    lengths = lengths.masked_fill(pages < 0, 0)
    # [B, C, T], T = R * S
    void = (torch.arange(S, device=q.device) >= lengths[..., None]).flatten(2)
    ids, part = pages.clamp(min=0).long(), torch.arange(C, device=q.device)[:, None]
    # [B, C, T, H / C, D]
    keys, values = (x.unflatten(2, (C, H // C))[ids, :, part].flatten(2, 3).float() for x in (k, v))
    values.masked_fill_(void[..., None, None], 0)  # 0 times an unwritten NaN would be NaN
    s = torch.einsum("bchgd,bcthd->bchgt", q.float().view(B, C, H // C, HQ // H, D), keys) * scale
    s = s.masked_fill(void[:, :, None, None], -torch.inf)
    lse = torch.logsumexp(s, dim=-1)  # -inf for an empty set
    p = torch.exp(s - lse.clamp(min=torch.finfo(torch.float32).min)[..., None])
    mean = torch.einsum("bchgt,bcthd->bchgd", p, values).flatten(1, 3)
    return mean, lse.flatten(1)


def _attend_pages_native(q, k, v, pages, last_page, last_len, scale, slot_of=None, n_pages=None):
    q, pages = q.float(), resident_slots(slot_of, pages)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    threads = torch.get_num_threads()
    _native.attend_batch(q, k, v, pages, last_page, last_len, scale, out, lse, threads)
    return out, lse


def merge_states(
    out_a: Float32[Tensor, "B HQ D"],
    lse_a: Float32[Tensor, "B HQ"],
    out_b: Float32[Tensor, "B HQ D"],
    lse_b: Float32[Tensor, "B HQ"],
) -> tuple[Float32[Tensor, "B HQ D"], Float32[Tensor, "B HQ"]]:
    """Attention over the union of two disjoint sets, from the attention over each.

    lse = log(e^a + e^b), out = out_a + w (out_b - out_a) with w = e^b / (e^a + e^b) = sigmoid(b - a), which is accurate
    for any lse; e^(a - lse) with a rounded lse is not. Natural logarithm; an empty set has out = 0 and lse = -inf, and
    gives exactly the other's values. The second part may be in pinned memory.
    Source: ScoutAttention Algorithm 1 line 12 (MERGE); FlashAttention-2 section 3.1.
    """
    run = kernels.attend.merge_states if out_a.is_cuda else merge_states_reference
    return run(out_a, lse_a, out_b, lse_b)


def merge_states_reference(out_a, lse_a, out_b, lse_b):
    weight = (lse_b - lse_a).sigmoid_().nan_to_num_(nan=0.0)  # NaN if both are empty
    return torch.lerp(out_a, out_b, weight[..., None]), torch.logaddexp(lse_a, lse_b)
