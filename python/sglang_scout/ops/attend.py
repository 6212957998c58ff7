"""Partial attention of one decode step over a set of pages, with its log-sum-exp."""

from __future__ import annotations

import torch

from ..core.registry import Op, Tolerance
from . import native, triton
from .layers import resident_slots
from .shapes import Shapes

Partial = tuple[torch.Tensor, torch.Tensor]

# Every implementation widens K and V to fp32 exactly and keeps q, scores and sums in fp32, so the
# dtype of the pages does not matter: what differs is the order of summation and the exponential.
_REASON = "same fp32 products, summed in another order; vector exp within a few ulp"
TOLERANCES = {name: Tolerance(1e-5, 1e-5, _REASON) for name in ("float32", "bfloat16", "float16")}


def attend_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    last_page: torch.Tensor | None,
    last_len: torch.Tensor | None,
    scale: float,
    logit_cap: float = 0.0,
    out: Partial | None = None,
    slot_of: torch.Tensor | None = None,
    n_pages: torch.Tensor | None = None,
) -> Partial:
    """`attend_pages` by gathering the pages.

    s = scale q.K, lse = log sum e^s, out = sum e^(s - lse) V: FlashAttention-2 section 3.1;
    softcap s = c tanh(s / c) as in Gemma 2.
    """
    B, S, (H, D) = q.shape[0], k.shape[1], k.shape[2:]
    pages = resident_slots(slot_of, pages)
    lengths = torch.full_like(pages, S)
    if last_page is not None and last_len is not None:
        pages = torch.cat((pages, last_page[:, None]), dim=1)
        lengths = torch.cat((lengths, last_len[:, None]), dim=1)
    lengths = lengths.masked_fill(pages < 0, 0)
    void = (torch.arange(S, device=q.device) >= lengths[..., None]).flatten(1)  # [B, T], T = R * S
    ids = pages.clamp(min=0).flatten()
    keys, values = (x.index_select(0, ids).view(B, -1, H, D).float() for x in (k, v))
    values.masked_fill_(void[..., None, None], 0)  # 0 times an unwritten NaN would be NaN
    s = torch.einsum("bhgd,bthd->bhgt", q.view(B, H, -1, D), keys) * scale
    if logit_cap > 0:
        s = logit_cap * torch.tanh(s / logit_cap)
    s = s.masked_fill(void[:, None, None], -torch.inf)
    lse = torch.logsumexp(s, dim=-1)  # -inf for an empty set
    p = torch.exp(s - lse.clamp(min=torch.finfo(torch.float32).min)[..., None])
    mean = torch.einsum("bhgt,bthd->bhgd", p, values).flatten(1, 2)
    if out is None:
        return mean, lse.flatten(1)
    return out[0].copy_(mean), out[1].copy_(lse.flatten(1))


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    last_page: torch.Tensor | None,
    last_len: torch.Tensor | None,
    scale: float,
    logit_cap: float = 0.0,
    out: Partial | None = None,
    slot_of: torch.Tensor | None = None,
    n_pages: torch.Tensor | None = None,
) -> None:
    shapes = Shapes("attend_pages")
    shapes.bind("k", k, "PSHD")
    shapes.bind("v", v, "PSHD", k.dtype)
    shapes.bind("pages", pages, "BR", torch.int32)
    shapes.bind_query(q)
    if (last_page is None) != (last_len is None):
        shapes.fail("last_page and last_len come together or not at all")
    if last_page is not None and last_len is not None:
        shapes.bind("last_page", last_page, "B", torch.int32)
        shapes.bind("last_len", last_len, "B", torch.int32)
    if not logit_cap >= 0:
        shapes.fail(f"logit_cap is {logit_cap}, expected 0 (none) or more")
    if out is not None:
        shapes.sizes["Q"] = q.shape[1]
        shapes.bind("out[0]", out[0], "BQD", torch.float32)
        shapes.bind("out[1]", out[1], "BQ", torch.float32)
    if slot_of is not None:
        shapes.bind("slot_of", slot_of, "I", torch.int32)
    if n_pages is not None:
        shapes.bind("n_pages", n_pages, "B", torch.int32)


ATTEND_PAGES = Op(
    "attend_pages",
    attend_reference,
    [native.ATTEND_PAGES, triton.ATTEND_PAGES],
    check=_check,
    tolerances=TOLERANCES,
)


def attend_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    last_page: torch.Tensor | None,
    last_len: torch.Tensor | None,
    scale: float,
    logit_cap: float = 0.0,
    impl: str = "auto",
    *,
    out: Partial | None = None,
    slot_of: torch.Tensor | None = None,
    n_pages: torch.Tensor | None = None,
) -> Partial:
    """Attend from one query per request to all tokens of the given pages.

    Args:
        q: [B, HQ, D] float32, after RoPE; query head h uses KV head h // (HQ / H).
        k, v: [P, S, H, D] float32, bfloat16 or float16; K after RoPE.
        pages: [B, R] int32 below P, all S tokens of each are attended to; negative ones, anywhere,
            are skipped.
        last_page, last_len: [B] int32 or both None: one more page (negative: none), of which only
            the first last_len (1..S) tokens count. What lies behind them is never used.
        scale: factor on q.k, 1/sqrt(D) as a rule.
        logit_cap: 0 for none, otherwise scores become cap * tanh(score / cap).
        out: (out, lse) to write into, instead of new tensors.
        slot_of: [I] int32 below P; then ``pages`` are ids below I, and page i is what lies at
            slot_of[i] of the pool. Those with a negative slot are skipped, by "triton" also ids beyond I. Not
            for ``last_page``.
        n_pages: [B] int32; a promise that all of a row's ``pages`` from there on are negative, so that a wide
            table costs a short request nothing. Whether it is used is up to the implementation.
    Returns:
        (out [B, HQ, D] float32, lse [B, HQ] float32, natural logarithm). An empty set attends to
        nothing: out = 0, lse = -inf; so do keys that make every score -inf ("triton" answers NaN: it
        splits floats into parts, and inf has none).
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    Source: ScoutAttention Algorithm 1 lines 7 and 10 (CPUATTN, GPUATTN).
    """
    return ATTEND_PAGES(
        q, k, v, pages, last_page, last_len, scale, logit_cap, impl=impl, out=out, slot_of=slot_of,
        n_pages=n_pages,
    )  # fmt: skip
