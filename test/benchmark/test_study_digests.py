"""The digests and choices of the selection study score as the servers' ops do."""

from __future__ import annotations

import torch

from benchmark.accuracy.study.selection import Digest, Setting, choose, page_scores, reduced
from sglang_scout.ops.minmax import score_pages_reference
from sglang_scout.ops.pages import LayerPages
from sglang_scout.ops.rotated import (
    STATS_BYTES,
    build_layer_rotated_reference,
    planes_shape,
    score_rotated_reference,
)
from sglang_scout.ops.select import select_pages

H, G, W = 2, 3, 5


def made(seed, N, D):
    """Pages [H, N, S, D], the same as [N, S, H, D], queries [W, H * G, D] and by KV head [H, W * G, D], a table of all
    pages [W, N]."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randn(H, N, 32, D, generator=generator)
    q = torch.randn(W, H * G, D, generator=generator)
    grouped = q.view(W, H, G, D).transpose(0, 1).flatten(1, 2) * D**-0.5
    table = torch.arange(N, dtype=torch.int32).expand(W, N).contiguous()
    return pages, pages.permute(1, 2, 0, 3).contiguous(), q, grouped, table


def test_bounds_choose_what_the_servers_op_chooses():
    N, D, k = 23, 64, 6
    pages, by_page, q, grouped, table = made(3, N, D)
    full = torch.tensor([23, 22, 20, 7, 6])
    every = full.repeat_interleave(G)
    u = Digest("minmax-32", pages).scores(grouped, N, pages[:, :0], every).view(H, W, G, N)
    setting = Setting(k * 32)
    chosen = choose(setting, page_scores(setting, u, full), full)[0]
    bounds = by_page.amin(1), by_page.amax(1)
    scores = score_pages_reference(q, *bounds, table, full.int(), D**-0.5)
    slots = torch.full((N,), -1, dtype=torch.int32)
    selected = select_pages(scores, table, full.int(), slots, k, 1, 1).pages
    for row in range(W):
        assert set(chosen[row].nonzero().ravel().tolist()) == set(selected[row].tolist()) - {-1}


def test_digests_score_as_the_servers_op():
    N, D = 9, 64
    pages, by_page, q, grouped, table = made(4, N, D)
    shapes = planes_shape(D), (D + STATS_BYTES,)
    parts = [torch.zeros(1, N, H, *shape, dtype=torch.uint8) for shape in shapes]
    values = torch.randn(N, 32, H, D, generator=torch.Generator().manual_seed(5)) * D**-0.5
    layers = LayerPages.of([by_page], [values], "cpu")
    build_layer_rotated_reference(layers, torch.arange(N), *parts)
    full = torch.full((W,), N, dtype=torch.int32)
    expected = score_rotated_reference(q, *(x[0] for x in parts), table, full, D**-0.5)
    digest, norms = Digest("rotated-2", pages), values.norm(dim=-1).log().permute(2, 0, 1)
    u, of_values = (
        digest.scores(grouped, N, pages[:, :0], full.repeat_interleave(G), x).view(H, W, G, N)
        for x in (None, norms)
    )
    found = reduced("value", u, (0, 2), of_values)
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=1e-4)


def test_windows_score_as_the_servers_op():
    """A window counts only if it ends in a full page of its query, though later tokens of the text are known."""
    from sglang_scout.policy.learned import half_means, score_embeddings_reference

    N, D = 9, 64
    pages, by_page, q, grouped, table = made(6, N, D)
    full = torch.tensor([9, 8, 5, 2, 1])
    vectors = grouped.view(H, W, G, D)[:, :, 0]
    expected = score_embeddings_reference(
        vectors.transpose(0, 1).flatten(0, 1), half_means(by_page), table, full.int()
    )
    found = Digest("window", pages).scores(vectors, 6, pages[:, 6:], full)
    offered = torch.arange(N) < full[:, None]
    found = found.masked_fill(~offered, -torch.inf).transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(found, expected)


def test_sparda_s_own_sparse_attention_sums_the_heads_before_it_pools_windows():
    N, D = 7, 64
    pages, _, _, grouped, _ = made(7, N, D)
    full = torch.tensor([7, 6, 4, 3, 2])
    digest, setting = (
        Digest("window", pages),
        Setting(64, "window", reduce="windows", grain="head"),
    )
    finer = digest.windows(grouped, N, pages[:, :0], full.repeat_interleave(G)).view(H, W, G, N, 2)
    found = page_scores(setting, finer.amax(-1), full, finer)
    halves = pages.unflatten(2, (2, 16)).mean(3).flatten(1, 2)  # [H, 2 N, D]
    for row, count in enumerate(full.tolist()):
        means = (halves[:, : 2 * count - 1] + halves[:, 1 : 2 * count]) / 2
        logits = grouped.view(H, W, G, D)[:, row] @ means.mT
        shares = logits.softmax(-1).sum(1)  # [H, 2 n - 1]
        best = torch.nn.functional.pad(shares, (0, 1)).unflatten(-1, (-1, 2)).amax(-1)
        torch.testing.assert_close(found[:, row, :count], best)
        assert not found[:, row, count:].any()
