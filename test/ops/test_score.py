import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from implementations import implementation, implementations
from score_cases import DIMS, DTYPES, OPS, inputs, literal, scores
from sglang_scout.ops.minmax import _score_pages_native
from sglang_scout.ops.triton.score import parts_of

EVERY = implementations(*OPS.items(), also="kind")


@EVERY
@pytest.mark.usefixtures("isa")
@settings(max_examples=30)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, n) for n in (4, 12, 20, 4, 6))),
    D=st.sampled_from(DIMS),
    seed=st.integers(0, 2**31),
)
def test_equals_the_formula(agree, kind, impl, dtype, sizes, D, seed):
    arguments = inputs(kind, seed, *sizes, D, dtype)
    agree(OPS[kind], scores(kind, *arguments, impl), literal(kind, *arguments), dtype)


@EVERY
def test_void_columns_are_minus_infinity_whatever_they_hold(kind, impl):
    """And they do not affect the page before."""
    q, digests, table, _ = inputs(kind, 5, B=5)
    table = torch.where(table == 11, 10, table)
    for part in digests:  # a page that was never written: NaN
        part[11].view(torch.uint8).fill_(255)
    table[:, 6:], table[:, 2], table[4] = 11, -1, -1
    n_full = torch.tensor([0, 1, 3, 6, 9], dtype=torch.int32)
    got = scores(kind, q, digests, table, n_full, impl).view(5, -1, 9)
    void = ((torch.arange(9) >= n_full[:, None]) | (table < 0))[:, None].expand_as(got)
    assert (got[void] == -torch.inf).all() and got[~void].isfinite().all()


@EVERY
def test_rows_that_are_longer_than_a_block_of_any_kernel(agree, kind, impl):
    """Bounds of different magnitude in each run of pages; a window extends into the next block; a row ends early."""
    q, digests, *_ = inputs(kind, 13, B=2, P=200, H=1, G=2)
    if digests[0].is_floating_point():
        digests = [
            x * (1 + torch.arange(200) // 50 % 3).view(-1, *[1] * (x.dim() - 1)) for x in digests
        ]
    table = (torch.arange(600, dtype=torch.int32) % 200).view(2, 300)
    table[0, 64:128] = -1
    n_full = torch.tensor([290, 70], dtype=torch.int32)
    arguments = q, digests, table, n_full
    got = scores(kind, *arguments, impl)
    agree(OPS[kind], got, literal(kind, *arguments), times=3.0)


@EVERY
@pytest.mark.parametrize(("B", "N"), [(0, 4), (3, 0)])
def test_no_request_and_no_column(kind, impl, B, N):
    q, digests, *_ = inputs(kind, 2)
    q = q[: len(q) // 3 * B]
    table, n_full = torch.zeros(B, N, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    assert scores(kind, q, digests, table, n_full, impl).numel() == 0


@pytest.mark.parametrize("kind", ["minmax", "rotated-2"])
@pytest.mark.parametrize(("name", "value"), [("table", 12), ("n_full", 10), ("n_full", -1)])
def test_native_refuses_what_would_read_outside(kind, name, value):
    *arguments, table, n_full = inputs(kind, 1)
    n_full[0] = 9
    {"table": table, "n_full": n_full}[name].view(-1)[0] = value
    with pytest.raises(ValueError, match=rf"{OPS[kind].__name__}: {name}.*{value}"):
        scores(kind, *arguments, table, n_full, implementation(OPS[kind], "native"))


@pytest.mark.usefixtures("isa")
def test_huge_bounds_are_finite():
    kmin, kmax = torch.full((3, 1, 64), -3e38), torch.full((3, 1, 64), 3e38)
    table, n_full = torch.arange(3, dtype=torch.int32)[None], torch.tensor([3], dtype=torch.int32)
    q = torch.full((1, 2, 64), 3e38)
    out = _score_pages_native(q, kmin, kmax, table, n_full, 1.0)
    assert out.isfinite().all() and (out == out[0, 0]).all()


@pytest.mark.parametrize(
    ("rows", "blocks", "parts", "waves"),
    [  # 528 programs at once: an H100's
        (32 * 8, 32, 2, 1),  # 32 requests of 64k tokens, 8 KV heads
        (8, 64, 64, 1),  # one request of 128k: a block each
        (8, 3, 3, 1),  # no more parts than blocks
        (64 * 8, 32, 1, 1),
        (67 * 8, 32, 8, 9),  # a little more than fit: 9 waves of 4 blocks, not 2 of 32
        (200 * 8, 32, 4, 13),
    ],
)
def test_parts_fill_waves(rows, blocks, parts, waves):
    found = parts_of(rows, blocks, 528)
    assert (found, -(-rows * found // 528)) == (parts, waves)
