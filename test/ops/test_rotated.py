"""Digests of two bits per key element, and of one in calibrated coordinates: stored contents, and page scores."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from page_weights import coordinates
from sglang_scout.ops import rotated
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.rotated import build_layer_rotated, mass_change_rotated, rotate, score_rotated
from sglang_scout.ops.score import REDUCTIONS

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BUILDS = pytest.mark.parametrize("impl", build_layer_rotated.names())
SCORES = pytest.mark.parametrize("impl", score_rotated.names())
BITS = pytest.mark.parametrize("bits", [1, 2])
DIMS = (16, 48, 64, 80, 96, 128, 256)


def by(bits, H, D):
    """Coordinates of digests of one bit."""
    return coordinates(H, D) if bits == 1 else None


def empty(P, H, D, bits):
    """(planes, stats) of one layer, with 7 in every byte."""
    shape = (1, P, H, *rotated.planes_shape(bits, D))
    stats = 1, P, H, D + rotated.STATS_BYTES
    return [torch.full(x, 7, dtype=torch.uint8) for x in (shape, stats)]


def digests(k, bits, impl="reference", ids=None, v=None):
    """Digests of all pages of one layer [P, 32, H, D], or of ``ids``; values are keys unless given."""
    P, _, H, D = k.shape
    built = empty(P, H, D, bits)
    ids = torch.arange(P) if ids is None else ids
    layers = LayerPages.of([k], [k if v is None else v], "cpu")
    of_layers = coordinates(1, H, D) if bits == 1 else None
    build_layer_rotated(layers, ids, *built, coordinates=of_layers, impl=impl)
    return [x[0] for x in built]


def keys(seed, P, H, D, dtype=torch.float32):
    """With a mean, and some channels far larger than others."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.where(torch.rand(D, generator=rng) < 0.1, 8.0, 1.0)
    k = torch.randn(P, 32, H, D, generator=rng) + 2 * torch.randn(P, 1, H, D, generator=rng)
    return (k * size).to(dtype)


def check_norms(v, stats):
    """Accurate to half a step of the largest."""
    expected = v.double().nan_to_num(0.0).clamp(-rotated.LARGEST, rotated.LARGEST).norm(dim=-1)
    found = rotated.value_norms(stats).double()
    error = (found - expected.transpose(1, 2)).abs()
    assert (error <= 0.502 / 255 * found.amax(-1, keepdim=True) + 1e-30).all()
    assert not stats[..., -8:].any()


def check_built(k, built, bits):
    """Against the formula in float64: within one quantization step, and equal bits except close to a threshold."""
    planes, stats = built
    H, D = k.shape[-2:]
    x = k.double().nan_to_num(0.0).clamp(-rotated.LARGEST, rotated.LARGEST).transpose(1, 2)
    turn = rotated._rotation(D, x.device) if bits == 2 else by(bits, H, D).keys.mT
    x = x @ turn.double()
    step = stats[..., D + 64 : D + 68].contiguous().view(torch.float32).double()
    mean = stats[..., :D].contiguous().view(torch.int8).double()
    expected = x.mean(2)
    torch.testing.assert_close(
        step, (expected.abs().amax(-1, keepdim=True) / 127).clamp(min=2.0**-126), atol=0, rtol=1e-4
    )
    assert ((mean - expected / step).abs() <= 0.51 + 1e-4 * mean.abs()).all()
    x = x - (mean * step)[:, :, None]
    if bits == 1:
        channel, width, levels, gain = by(bits, H, D).bits[:, None].double().unbind(2)
        x = x.gather(-1, channel.long().expand(len(x), -1, 32, -1))
        scale = (x * gain).square().sum(-1).sqrt()
    else:
        scale = x.square().mean(-1).sqrt()
    stored = stats[..., D : D + 64].contiguous().view(torch.bfloat16).double()
    torch.testing.assert_close(stored, scale, atol=1e-30, rtol=2.0**-8)
    # Rounding of the rotation is relative to the keys.
    largest = x.abs().amax((-1, -2), keepdim=True)
    close = 1e-5 * scale[..., None] + 2e-6 * (largest + k.double().nan_to_num(0.0).abs().max())
    found = rotated._unpacked(planes)
    if bits == 1:
        unit = (2 * width * scale[..., None]).clamp(min=1e-30)
        level = x / unit
        index = level.floor().clamp(-levels, levels - 1) + levels
        clear = (level - level.round()).abs() * unit > close
        assert ((found[:, :, 0] > 0) == (index % 2 == 1))[clear].all()
        return
    assert ((found[:, :, 0] > 0) == (x >= 0))[x.abs() > close].all()
    margin = x.abs() - rotated.FIRST * scale[..., None]
    outside = found[:, :, 1] == found[:, :, 0]
    assert (outside == (margin > 0))[margin.abs() > close].all()


@BUILDS
@BITS
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, n) for n in (6, 3))),
    D=st.sampled_from(DIMS),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_named_rows_are_as_the_formula_says_and_others_untouched(
    impl, bits, dtype, sizes, D, seed, data
):
    P, H = sizes
    k, v = keys(seed, P, H, D, dtype), keys(seed + 1, P, H, D, dtype)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, P - 1), unique=True)), dtype=torch.int64)
    built = digests(k, bits, impl, ids, v)
    if len(ids):
        check_built(k[ids], [x[ids] for x in built], bits)
        check_norms(v[ids], built[1][ids])
    rest = [page for page in range(P) if page not in ids.tolist()]
    assert all((x[rest] == 7).all() for x in built)


@BUILDS
@BITS
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, math.inf, -math.inf, math.nan])
def test_pages_of_one_value_and_single_bad_elements(impl, bits, value):
    k = keys(1, 3, 2, 64)
    k[0] = value
    k[1, 5, 0, 9] = value
    k[2, 7] = value
    built = digests(k, bits, impl)
    decoded = rotated.decode(*built, by(bits, 2, 64))
    assert decoded.isfinite().all()
    if math.isfinite(value):
        turn = None if bits == 2 else by(bits, 2, 64).keys
        same = rotated._turned(k[0].transpose(0, 1), turn)
        assert (decoded[0] - same).abs().max() <= 0.02 * abs(value) * 64**0.5
        check_built(k, built, bits)
    check_norms(k, built[1])


@BUILDS
def test_keys_are_decoded_as_well_as_their_bits_allow(impl):
    """The levels' squared error for a normal variable is 0.118 of its variance."""
    k = torch.randn(50, 32, 1, 128, generator=torch.Generator().manual_seed(3))
    error = rotated.decode(*digests(k, 2, impl)) - rotate(k.transpose(1, 2))
    assert 0.9 < error.square().mean() / 0.118 < 1.05


def literal(q, planes, stats, table, n_full, scale, reduce):
    """The formula in float64, one row at a time; "log mass" is of all pages of a row and head."""
    H, D = planes.shape[1], q.shape[-1]
    G, of_layer = q.shape[1] // H, by(planes.shape[2], H, D)
    x = rotated.decode(planes, stats, of_layer).double().repeat_interleave(G, 1)  # [P, HQ, 32, D]
    norms = rotated.value_norms(stats).double().repeat_interleave(G, 1)  # [P, HQ, 32]
    turn = rotated._rotation(D, q.device) if of_layer is None else of_layer.queries.mT
    q = (q.double().unflatten(1, (H, G)) @ turn.double()).flatten(1, 2)
    size = q.shape[:2] if reduce == "log mass" else table.shape
    result = torch.full(size, -torch.inf, dtype=torch.float64)
    for b, row in enumerate(table):
        columns = [n for n in range(int(n_full[b])) if row[n] >= 0]
        if columns:
            pages = row[columns].long()
            logits = torch.einsum("hd,nhtd->nht", q[b] * scale, x[pages])
            u, worth = logits.logsumexp(-1), (logits.softmax(-1) * norms[pages]).sum(-1)
            if reduce == "log mass":
                result[b] = u.logsumexp(0)
                continue
            mass = (torch.softmax(u, 0) * worth).sum(1)
            result[b, columns] = mass if reduce == "mass" else u.log_softmax(0).amax(1)
    return result


def inputs(seed, B=3, N=9, P=12, H=2, G=3, D=64, bits=2):
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(P, 32, H, D, generator=rng) + torch.randn(P, 1, H, D, generator=rng)
    # With norms of about 1, so that scores have similar magnitude.
    v = torch.rand(P, 32, H, D, generator=rng) * D**-0.5
    q = torch.randn(B, H * G, D, generator=rng)
    table = torch.randint(-1, P, (B, N), generator=rng, dtype=torch.int32)
    n_full = torch.randint(0, N + 1, (B,), generator=rng, dtype=torch.int32)
    return q, *digests(k, bits, v=v), table, n_full


@SCORES
@BITS
@pytest.mark.parametrize("reduce", REDUCTIONS)
@settings(max_examples=8)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 9, 12, 2, 5))),
    D=st.sampled_from(DIMS),
    seed=st.integers(0, 2**31),
)
def test_equals_the_formula(agree, impl, bits, reduce, sizes, D, seed):
    B, N, P, H, G = sizes
    arguments = *inputs(seed, B, N, P, H, G, D, bits), D**-0.5, reduce
    out = torch.full((B, N), torch.nan)
    got = score_rotated(*arguments, impl=impl, out=out, coordinates=by(bits, H, D))
    assert got is out
    agree(score_rotated, got, literal(*arguments))


@SCORES
@BITS
@settings(max_examples=8)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 70, 12, 2, 4))),
    D=st.sampled_from(DIMS),
    seed=st.integers(0, 2**31),
)
def test_the_change_of_a_mass_equals_the_formula(agree, impl, bits, sizes, D, seed):
    B, N, P, H, G = sizes
    q, *rest = inputs(seed, B, N, P, H, G, D, bits)
    q_ahead = q + 0.3 * torch.randn(q.shape, generator=torch.Generator().manual_seed(seed))
    real, ahead = (literal(x, *rest, D**-0.5, "log mass") for x in (q, q_ahead))
    got = mass_change_rotated(q, q_ahead, *rest, D**-0.5, coordinates=by(bits, H, D), impl=impl)
    assert (got[real == -torch.inf] == 0).all()
    agree(mass_change_rotated, got, (real - ahead).nan_to_num(nan=0.0), times=2.0)


@SCORES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_mass_changes_by_each_head_s_own_pages(agree, impl, dtype):
    """A list for a KV head gives the same as if that were the only head."""
    q, planes, stats, *_ = inputs(4, B=3, P=20, H=2, G=3)
    q, q_ahead = q.to(dtype), (q + 0.3 * torch.randn(q.shape)).to(dtype)
    pages = torch.randint(0, 20, (6, 37), dtype=torch.int32)
    n_pages = torch.tensor([37, 3, 0, 1, 20, 16], dtype=torch.int32)
    got = mass_change_rotated(q, q_ahead, planes, stats, pages, n_pages, 0.125, impl=impl)
    for head in range(2):
        heads, of = slice(3 * head, 3 * head + 3), slice(head, None, 2)
        one = [x[:, heads].contiguous() for x in (q, q_ahead)]
        one += [x[:, head : head + 1].contiguous() for x in (planes, stats)]
        one += [x[of].contiguous() for x in (pages, n_pages)]
        agree(
            mass_change_rotated,
            got[:, heads],
            mass_change_rotated.reference(*one, 0.125),
            times=2.0,
        )
    assert (got[1, :3] == 0).all()


@SCORES
@BITS
@settings(max_examples=8)
@given(
    seed=st.integers(0, 99),
    exponents=st.lists(st.integers(-8, 4), min_size=64, max_size=64),
    size=st.sampled_from((1e-6, 1.0, 30.0)),
)
def test_channels_of_very_different_size(agree, impl, bits, seed, exponents, size):
    """Errors are relative to the norms of query and key, of which the latter is about 11 here."""
    q, *rest = inputs(seed, bits=bits)
    q = size * q * 2.0 ** torch.tensor(exponents, dtype=torch.float32)
    arguments = q, *rest, 0.125, "max"
    got = score_rotated(*arguments, coordinates=by(bits, 2, 64), impl=impl)
    logits = float(q.norm(dim=-1).max()) * 11 * 0.125
    agree(score_rotated, got, literal(*arguments), times=max(1.0, logits / 11))


@SCORES
@BITS
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_rows_that_are_longer_than_a_block_of_any_kernel(agree, impl, bits, reduce):
    q, planes, stats, _, _ = inputs(13, B=2, P=50, H=1, G=2, bits=bits)
    table = (torch.arange(600, dtype=torch.int32) % 50).view(2, 300)
    table[0, 64:128] = -1
    n_full = torch.tensor([290, 70], dtype=torch.int32)
    arguments = q, planes, stats, table, n_full, 0.125, reduce
    got = score_rotated(*arguments, coordinates=by(bits, 1, 64), impl=impl)
    agree(score_rotated, got, literal(*arguments))


@SCORES
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_void_columns_are_minus_infinity_whatever_they_hold(impl, reduce):
    q, planes, stats, table, _ = inputs(5, B=5, N=9, P=12)
    stats[11] = 255  # NaN: a page that was never written
    table = torch.where(table == 11, 10, table)
    table[:, 6:] = 11
    table[:, 2] = -1
    table[4] = -1
    n_full = torch.tensor([0, 1, 3, 6, 9], dtype=torch.int32)
    got = score_rotated(q, planes, stats, table, n_full, 0.125, reduce, impl=impl)
    void = (torch.arange(9) >= n_full[:, None]) | (table < 0)
    assert (got[void] == -torch.inf).all()
    assert got[~void].isfinite().all()


@SCORES
@BITS
@pytest.mark.parametrize("fill", [0.0, 1.0, math.inf, math.nan])
def test_one_page_and_pages_of_one_value(impl, bits, fill):
    k = torch.full((3, 32, 2, 32), fill)
    q = torch.randn(2, 4, 32)
    table = torch.tensor([[1, -1, -1], [0, 1, 2]], dtype=torch.int32)
    n_full = torch.tensor([3, 3], dtype=torch.int32)
    one = torch.full_like(k, 32**-0.5)
    arguments = q, *digests(k, bits, v=one), table, n_full, 0.125, "mass"
    got = score_rotated(*arguments, coordinates=by(bits, 2, 32), impl=impl)
    expected = torch.tensor([[4, -math.inf, -math.inf], [4 / 3] * 3])
    torch.testing.assert_close(got, expected)


@SCORES
@pytest.mark.parametrize(("B", "N"), [(0, 4), (2, 0)])
def test_no_request_and_no_column(impl, B, N):
    q, planes, stats, *_ = inputs(2)
    table, n_full = torch.zeros(B, N, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    q = q[:1].expand(B, -1, -1).contiguous()
    arguments = q, planes, stats, table, n_full, 1.0
    assert score_rotated(*arguments, impl=impl).shape == (B, N)
    assert (mass_change_rotated(q, *arguments, impl=impl) == 0).all()


@pytest.mark.parametrize("impl", ["native"])
@pytest.mark.parametrize(("name", "value"), [("table", 12), ("n_full", 10), ("n_full", -1)])
def test_native_refuses_what_would_read_outside(impl, name, value):
    q, planes, stats, table, n_full = inputs(1)
    n_full[0] = 9
    {"table": table, "n_full": n_full}[name].view(-1)[0] = value
    with pytest.raises(ValueError, match=rf"score_rotated: {name}\[0.*\]={value} is "):
        score_rotated(q, planes, stats, table, n_full, 1.0, impl=impl)
