"""Page scores by every kind of digest: inputs, the call, and the formula written out in float64."""

from __future__ import annotations

import torch

from op_calls import of_policies
from sglang_scout.ops import minmax, rotated
from sglang_scout.ops.pages import LayerPages

OPS = {
    "minmax": minmax.score_pages,
    "rotated-2": rotated.score_rotated,
    **of_policies("SCORES"),
}
BY_HEAD = ("pilot", "means")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIMS = (16, 48, 64, 80, 96, 128, 256)


def rotated_digests(k, v, impl=rotated.build_layer_rotated_reference):
    """[planes, stats] of pages [P, 32, H, D]."""
    P, _, H, D = k.shape
    shapes = rotated.planes_shape(D), (D + rotated.STATS_BYTES,)
    built = [torch.full((1, P, H, *shape), 7, dtype=torch.uint8) for shape in shapes]
    impl(LayerPages.of([k], [v], "cpu"), torch.arange(P), *built)
    return [x[0] for x in built]


def inputs(kind, seed, B=3, N=9, P=12, H=2, G=3, D=64, dtype=torch.float32):
    """(q, digests, table, n_full), with gaps in the table."""
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(P, 32, H, D, generator=rng) + torch.randn(P, 1, H, D, generator=rng)
    q = torch.randn(B, H * G, D, generator=rng)
    if kind == "minmax":
        q, digests = q.to(dtype).float(), k.to(dtype).aminmax(dim=1)
    elif kind in BY_HEAD:
        q = q[:, :H].flatten(0, 1).contiguous()
        digests = [k[:, : 1 + (kind == "means")].transpose(1, 2).contiguous().to(dtype)]
    else:  # with norms of about 1, so that scores have similar magnitude
        digests = rotated_digests(k, torch.rand(k.shape, generator=rng) * D**-0.5)
    table = torch.randint(-1, P, (B, N), generator=rng, dtype=torch.int32)
    n_full = torch.randint(0, N + 1, (B,), generator=rng, dtype=torch.int32)
    return q, [*digests], table, n_full


def scores(kind, q, digests, table, n_full, impl):
    arguments = q, *digests, table, n_full
    if kind in BY_HEAD:
        return impl(*arguments)
    return impl(*arguments, q.shape[2] ** -0.5)


def masses(kind, q, digests, pages):
    """Of one request: u [HQ, n] of each query head and page, and the weight of each page's mass [HQ, n]."""
    G, scale = len(q) // digests[0].shape[1], q.shape[1] ** -0.5
    if kind == "minmax":
        low, high = (x[pages].double().repeat_interleave(G, 1) for x in digests)  # [n, HQ, D]
        u = torch.maximum(q * low, q * high).sum(-1).T * scale
        return u, torch.ones_like(u)
    of_pages = [x[pages] for x in digests]
    x = rotated.decode(*of_pages).double().repeat_interleave(G, 1)  # [n, HQ, 32, D]
    norms = rotated.value_norms(of_pages[1]).double().repeat_interleave(G, 1)  # [n, HQ, 32]
    q = q @ rotated._rotation(q.shape[1], q.device).double()
    logits = torch.einsum("hd,nhtd->hnt", q * scale, x)
    return logits.logsumexp(-1), (logits.softmax(-1) * norms.transpose(0, 1)).sum(-1)


def literal(kind, q, digests, table, n_full):
    """One row at a time, and for embeddings one page and window."""
    (B, N), H = table.shape, digests[0].shape[1]
    by_head = kind in BY_HEAD
    result = torch.full((B, H, N) if by_head else (B, N), -torch.inf, dtype=torch.float64)
    for b in range(B):
        columns = [n for n in range(min(N, int(n_full[b]))) if table[b, n] >= 0]
        if not columns:
            continue
        if not by_head:
            u, worth = masses(kind, q[b].double(), digests, table[b, columns].long())
            result[b, columns] = (u.softmax(1) * worth).sum(0)
            continue
        for h in range(H):
            for n in columns:
                halves = list(digests[0][table[b, n], h].double())
                if kind == "pilot":
                    halves *= 2
                elif n + 1 in columns:
                    halves.append(digests[0][table[b, n + 1], h, 0].double())
                pairs = zip(halves, halves[1:], strict=False)
                result[b, h, n] = max(q[b * H + h].double() @ (x + y) / 2 for x, y in pairs)
    return result.flatten(0, 1) if by_head else result
