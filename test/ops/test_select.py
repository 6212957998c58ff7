import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend_cases import i32
from implementations import implementations
from sglang_scout.ops.select import select_pages

IMPLS = implementations(select_pages)


def best_by_sorting(scores, pages, n_full, k, sink, recent):
    """Oracle for one row: forced columns, then the others by score. Returns {page: score}, forced."""
    columns = [n for n in range(n_full) if pages[n] >= 0]
    forced = [n for n in columns if n < sink or n >= n_full - recent]
    others = sorted((n for n in columns if n not in forced), key=lambda n: -scores[n])
    best = {pages[n]: scores[n] for n in (forced + others)[:k]}
    return best, {pages[n] for n in forced}


@st.composite
def cases(draw):
    B, N = draw(st.integers(1, 4)), draw(st.integers(0, 24))
    P = B * N + draw(st.integers(1, 5))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    levels = draw(st.sampled_from((2, 5, 10**6)))  # few levels: many ties
    scores = torch.randint(0, levels, (B, N), generator=rng) / levels
    table = torch.randperm(P, generator=rng)[: B * N].view(B, N).int()
    if draw(st.booleans()):
        table[torch.rand(B, N, generator=rng) < 0.2] = -1
    n_full = torch.randint(0, N + 1, (B,), generator=rng, dtype=torch.int32)
    slot_of = torch.randint(-1, 3, (P,), generator=rng, dtype=torch.int32)
    sink, recent = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    k = draw(st.integers(max(1, sink + recent), max(1, sink + recent) + 12))
    return scores, table, n_full, slot_of, k, sink, recent


@IMPLS
@given(case=cases())
def test_equals_sorting_as_a_set(impl, case):
    scores, table, n_full, slot_of, k, sink, recent = case
    rows = torch.full((2, len(table) + 1, k), 99, dtype=torch.int32)
    out = rows[0, :-1], rows[1, :-1]
    chosen = impl(*case, out=out)
    assert [x.data_ptr() for x in chosen[:2]] == [x.data_ptr() for x in out]
    assert (rows[:, -1] == 99).all()
    assert [t.dtype for t in chosen] == [torch.int32] * 3
    assert chosen.pages.shape == chosen.missing.shape == (len(table), k)
    assert chosen.pages.is_contiguous()
    assert chosen.missing.is_contiguous()
    for b in range(len(table)):
        row, ids = scores[b].tolist(), table[b].tolist()
        best, forced = best_by_sorting(row, ids, int(n_full[b]), k, sink, recent)
        got = chosen.pages[b].tolist()
        filled = [page for page in got if page >= 0]
        assert got == filled + [-1] * (k - len(filled))  # packed to the left
        assert len(set(filled)) == len(filled) == len(best)
        assert forced <= set(filled)
        score_of = dict(zip(ids, row, strict=True))
        swapped_in, swapped_out = set(filled) - set(best), set(best) - set(filled)
        # Where the sets differ, the scores are equal: a tie was broken differently.
        assert sorted(score_of[p] for p in swapped_in) == sorted(best[p] for p in swapped_out)
        missing = [page for page in filled if slot_of[page] < 0]
        assert chosen.missing[b].tolist() == missing + [-1] * (k - len(missing))
        assert int(chosen.n_missing[b]) == len(missing)


@IMPLS
def test_forced_pages_win_over_any_score(impl):
    table, slot_of = i32([[10, 11, 12, 13, 14, 15]]), i32([-1] * 20)
    scores = torch.tensor([[-1e38, torch.inf, 3.0, torch.nan, -torch.inf, torch.inf]])
    # NaN ranks last, and is chosen if all fit; column 5 is not full.
    for k, expected in ((2, {10, 14}), (4, {10, 11, 12, 14}), (6, {10, 11, 12, 13, 14, -1})):
        got = impl(scores, table, i32([5]), slot_of, k, 1, 1)
        assert set(got.pages[0].tolist()) == expected


def test_too_few_pages_for_those_that_are_forced_are_refused():
    arguments = torch.zeros(1, 3), i32([[0, 1, 2]]), i32([3]), i32([0] * 4)
    for k, forced in ((1, (1, 1)), (0, (0, 0))):
        with pytest.raises(ValueError, match=f"k={k} cannot hold sink_pages={forced[0]}"):
            select_pages(*arguments, k, *forced)
