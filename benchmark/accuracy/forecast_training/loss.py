"""The loss of scripts/train_forecast.py: arXiv 2606.04511, section 4.4, with pages as the grid of inference.

Shapes: L layers, H KV heads, G query heads of each, D head size, r rank; per text T tokens, N pages, Q queries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PAGE_TOKENS = 32
SINK_PAGES = RECENT_PAGES = 1
"""Always selected, so excluded from both targets and predictions."""
# The logit of a page that is not a candidate; finite, so that its gradient is 0 and not NaN.
_NONE = -1e9


def page_targets(q: Tensor, k: Tensor, position: Tensor) -> Tensor:
    """Equation 12, max-pooled to pages: [H, Q, N] targets from the real queries of a layer.

        S^tgt = sum over the heads of a group of softmax(q K^tgt / sqrt(D))

    K^tgt are means of two adjacent keys (kernel 2, stride 1), which belong to the page of the first one.

    Args:
        q: [Q, H * G, D] and ``position`` [Q]; a query sees K^tgt if it sees its second key.
        k: [H, T, D], whole pages.
    """
    (H, T, D), Q = k.shape, len(q)
    fine = (k[:, 1:] + k[:, :-1]) / 2
    logits = torch.einsum("qhgd,htd->hgqt", q.view(Q, H, -1, D), fine) * D**-0.5
    logits.masked_fill_(torch.arange(1, T) > position[:, None], -torch.inf)
    mass = F.pad(logits.softmax(-1).sum(1), (0, 1))
    return mass.unflatten(-1, (T // PAGE_TOKENS, PAGE_TOKENS)).amax(-1)


def offered_pages(position: Tensor, pages: int) -> Tensor:
    """[Q, N] bool candidates: full pages before the query's own, without the first and the newest ones."""
    n = torch.arange(pages)
    return (n >= SINK_PAGES) & (n < (position // PAGE_TOKENS - RECENT_PAGES)[:, None])


def mean_scores(query: Tensor, halves: Tensor) -> Tensor:
    """[L, H, Q, N] of ``query`` [L, H, Q, D] with the means [L, N, H, 2, D], like `score_embeddings`."""
    first, second = torch.einsum("lhqd,lnhwd->lhqnw", query, halves).unbind(-1)
    following = F.pad(first, (0, 1), value=-torch.inf)[..., 1:]
    return (second + torch.maximum(first, following)) / 2


def pilot_scores(w_q: Tensor, queries: Tensor, w_k: Tensor, pooled: Tensor) -> Tensor:
    """[L, H, Q, N]: (w_q q) . (w_k pool) with w_q [L, H, r, G * D], queries [L, H, Q, G * D], w_k [L, H, r, 2 D] and
    pooled [L, N, H, 2 D]."""
    of_query = torch.einsum("lhrx,lhqx->lhqr", w_q, queries)
    return torch.einsum("lhqr,lhrx,lnhx->lhqn", of_query, w_k, pooled)


def restricted_kl(target: Tensor, logits: Tensor, offered: Tensor, top: int) -> Tensor:
    """Equation 14: [...] of targets and predictions [..., Q, N] over the pages ``offered`` [Q, N].

    The ``top`` best pages of the target are separate entries, all others are lumped into one. Both are distributions
    over these entries; the prediction is a softmax over pages (equation 13).
    """
    target = target.masked_fill(~offered, 0)
    best = target.topk(min(top, target.shape[-1]), -1).indices
    rest = target.scatter(-1, best, 0).sum(-1, keepdim=True)
    p = torch.cat([target.gather(-1, best), rest], -1)
    p = p / p.sum(-1, keepdim=True)
    log_q = logits.masked_fill(~offered, _NONE).log_softmax(-1)
    rest = log_q.scatter(-1, best, _NONE).logsumexp(-1, keepdim=True)
    log_q = torch.cat([log_q.gather(-1, best), rest], -1)
    return torch.where(p > 0, p * (p.clamp(min=1e-30).log() - log_q), 0.0).sum(-1)


def caught(target: Tensor, logits: Tensor, offered: Tensor, top: int) -> Tensor:
    """[...] target mass of the prediction's ``top`` best pages, relative to that of the target's own best."""
    target = target.masked_fill(~offered, 0)
    k = min(top, target.shape[-1])
    best = logits.masked_fill(~offered, _NONE).topk(k, -1).indices
    return target.gather(-1, best).sum(-1) / target.topk(k, -1).values.sum(-1)
