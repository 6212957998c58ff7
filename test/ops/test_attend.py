import math
import os
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import ImplementationError
from sglang_scout.core.split import Split
from sglang_scout.ops import native
from sglang_scout.ops.attend import attend_pages

IMPLS = pytest.mark.parametrize("impl", attend_pages.names())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDED = pytest.mark.parametrize("rounded", [False, True])


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def densely(q, k, v, pages, last_page, last_len, scale, logit_cap=0.0):
    """Oracle: softmax over the tokens written out, in float64, row by row and head by head."""
    B, HQ, D = q.shape
    G = HQ // k.shape[2]
    out = torch.zeros(B, HQ, D, dtype=torch.float64)
    lse = torch.full((B, HQ), -torch.inf, dtype=torch.float64)
    for b in range(B):
        parts = [(page, k.shape[1]) for page in pages[b].tolist() if page >= 0]
        if last_page is not None and last_page[b] >= 0:
            parts.append((int(last_page[b]), int(last_len[b])))
        if not parts:
            continue
        keys = torch.cat([k[page, :n] for page, n in parts]).double()
        values = torch.cat([v[page, :n] for page, n in parts]).double()
        for h in range(HQ):
            s = keys[:, h // G] @ q[b, h].double() * scale
            s = logit_cap * torch.tanh(s / logit_cap) if logit_cap else s
            lse[b, h] = torch.logsumexp(s, 0)
            out[b, h] = torch.softmax(s, 0) @ values[:, h // G]
    return out, lse


def poisoned(q):
    return torch.full(q.shape, torch.nan), torch.full(q.shape[:2], torch.nan)


def inputs(
    seed, B=3, P=7, S=8, H=2, G=3, D=64, R=5, dtype=torch.float32, spread=1.0, rounded=False
):
    """rounded: to ``dtype``, as a model's query is. Then a kernel may multiply in that type."""
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H * G, D, generator=rng) * spread
    q = q.to(dtype).float() if rounded else q
    k, v = (torch.randn(P, S, H, D, generator=rng).to(dtype) for _ in range(2))
    pages = torch.randint(-1, P, (B, R), generator=rng, dtype=torch.int32)
    last_page = torch.randint(-1, P, (B,), generator=rng, dtype=torch.int32)
    last_len = torch.randint(1, S + 1, (B,), generator=rng, dtype=torch.int32)
    return q, k, v, pages, last_page, last_len


@IMPLS
@pytest.mark.usefixtures("isa")
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, n) for n in (4, 9, 33, 4, 17))),
    D=st.sampled_from((16, 48, 64, 80, 96, 128, 256)),
    R=st.integers(0, 6),
    spread=st.sampled_from((0.1, 1.0, 8.0)),
    logit_cap=st.sampled_from((0.0, 30.0)),
    with_last=st.booleans(),
    rounded=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_dense_softmax(
    agree, impl, dtype, sizes, D, R, spread, logit_cap, with_last, rounded, seed
):
    B, P, S, H, G = sizes
    q, k, v, pages, *last = inputs(seed, B, P, S, H, G, D, R, dtype, spread, rounded)
    last = last if with_last else (None, None)
    out = poisoned(q)
    got = attend_pages(q, k, v, pages, *last, D**-0.5, logit_cap, impl=impl, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    expected = densely(q, k, v, pages, *last, D**-0.5, logit_cap)
    # A logit is rounded in proportion to its size, and its weight by as much as the logit moved.
    agree(attend_pages, got, expected, dtype, times=max(1.0, spread))


@pytest.mark.parametrize("token_bytes", [32, 160, 192, 320, 384, 512, 1024])
@pytest.mark.parametrize("block_s", [1, 2, 8, 16, 32, 64, 128])
def test_a_tile_of_pages_is_a_power_of_two(block_s, token_bytes):
    """Head sizes such as 80 in float32 leave room for three pages of 16 tokens."""
    from sglang_scout.ops.triton.attend import pages_per_tile

    tokens = pages_per_tile(block_s, token_bytes) * block_s
    assert tokens >= 16 and tokens.bit_count() == 1
    assert tokens <= max(64, block_s) and (tokens * token_bytes <= 16384 or tokens in (16, block_s))


@IMPLS
@pytest.mark.parametrize(
    ("H", "G", "D"), [(8, 5, 128), (2, 16, 128), (4, 1, 64), (1, 8, 256), (3, 2, 96)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@ROUNDED
def test_shapes_of_real_models(agree, impl, H, G, D, dtype, rounded):
    q, k, v, pages, *last = inputs(11, 2, 40, 32, H, G, D, 24, dtype, rounded=rounded)
    got = attend_pages(q, k, v, pages, *last, D**-0.5, impl=impl)
    agree(attend_pages, got, densely(q, k, v, pages, *last, D**-0.5), dtype)


@IMPLS
@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_that_page_that_head_and_no_neighbour(impl, dtype):
    """Every value names its page, token and head; one token outweighs all: out is its value."""
    P, S, H, G, D = 5, 4, 3, 2, 64
    name = torch.arange(P * S * H, dtype=torch.float32).view(P, S, H, 1)
    v = name.expand(P, S, H, D).to(dtype)  # 0..59, exact in 16 bits
    v = v.contiguous()
    k = torch.zeros(P, S, H, D, dtype=dtype)
    channel = torch.arange(P * S * H).view(P, S, H)  # each token has a channel of its own
    k.scatter_(3, channel[..., None], 1.0)
    for page in range(P):
        for token in (0, S - 1):
            q = torch.zeros(1, H * G, D)
            for head in range(H * G):
                q[0, head, channel[page, token, head // G]] = 200.0
            every = i32([list(range(P))])
            out, _ = attend_pages(q, k, v, every, None, None, 1.0, impl=impl)
            assert torch.equal(out[0, :, 0], name[page, token, :, 0].repeat_interleave(G))
            others = i32([[p if p != page else -1 for p in range(P)]])
            out, _ = attend_pages(q, k, v, others, i32([page]), i32([token + 1]), 1.0, impl=impl)
            assert torch.equal(out[0, :, 0], name[page, token, :, 0].repeat_interleave(G))


@IMPLS
@pytest.mark.parametrize("last", [(None, None), (i32([-1, -1]), i32([0, 999]))])
@pytest.mark.parametrize("R", [0, 3])
def test_empty_set(impl, last, R):
    q, k, v, *_ = inputs(2, B=2)
    out = poisoned(q)
    pages = torch.full((2, R), -1, dtype=torch.int32)
    attend_pages(q, k, v, pages, *last, 0.125, impl=impl, out=out)
    assert (out[0] == 0).all()
    assert (out[1] == -torch.inf).all()


@IMPLS
@pytest.mark.parametrize("dtype", DTYPES)
@ROUNDED
def test_what_was_never_written_is_never_used(agree, impl, dtype, rounded):
    """NaN in unnamed pages, in page 0 behind a -1, and behind last_len changes nothing."""
    q, k, v, _, _, _ = inputs(4, B=2, P=6, S=8, dtype=dtype, rounded=rounded)
    pages, last_page, last_len = i32([[-1, 2, -1, 3], [-1] * 4]), i32([4, 5]), i32([3, 1])
    expected = densely(q, k, v, pages, last_page, last_len, 0.125)
    for pool in (k, v):
        pool[0], pool[1], pool[4, 3:], pool[5, 1:] = (torch.nan,) * 4
    got = attend_pages(q, k, v, pages, last_page, last_len, 0.125, impl=impl, out=poisoned(q))
    agree(attend_pages, got, expected, dtype)


@IMPLS
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@ROUNDED
def test_large_scores_do_not_overflow(impl, sign, dtype, rounded):
    q, k, v, pages, *last = inputs(6, dtype=dtype, rounded=rounded)
    k[..., 0], q[..., 0] = 40.0, sign * 40.0  # every score near +-1600
    pages[:, 0] = 1
    got = attend_pages(q, k, v, pages, *last, 1.0, impl=impl)
    expected = densely(q, k, v, pages, *last, 1.0)
    assert torch.allclose(got[1].double(), expected[1], rtol=1e-6)
    # Scores of 1600 carry 1e-4 of rounding before the exponential, whoever computes them.
    assert torch.allclose(got[0].double(), expected[0], atol=2e-3)


@pytest.mark.parametrize("impl", ["reference", "native"])  # triton splits floats: inf - inf
@pytest.mark.parametrize("dtype", DTYPES)
@ROUNDED
def test_keys_that_mask_their_tokens(agree, impl, dtype, rounded):
    """A key of -inf where the query is positive hides its token; where it hides all, none is left."""
    q, k, v, pages, last_page, last_len = inputs(
        5, B=2, H=2, G=4, D=64, dtype=dtype, rounded=rounded
    )
    q[..., 0] = 1.0
    pages[:] = i32([0, 1, 2, 3, 4])
    last = i32([5, 6]), last_len
    k[:, :, 0, 0] = -torch.inf
    k[1, 3, 1, 0] = -torch.inf
    out, lse = attend_pages(q, k, v, pages, *last, 0.125, impl=impl)
    assert (out[:, :4] == 0).all() and (lse[:, :4] == -torch.inf).all()
    expected = densely(q, k, v, pages, *last, 0.125)
    agree(attend_pages, (out[:, 4:], lse[:, 4:]), (expected[0][:, 4:], expected[1][:, 4:]), dtype)
    k[4, 2, 0, 1] = torch.nan
    out, lse = attend_pages(q, k, v, pages, *last, 0.125, impl=impl)
    assert lse[:, :4].isnan().all(), "a NaN is not hidden by them"
    k[4, 2, 0, 1] = 0.0
    k[2, 5, 0, 0] = 1.0  # one token of each row is seen
    out, lse = attend_pages(q, k, v, pages, *last, 0.125, impl=impl)
    for row in range(2):
        assert torch.equal(out[row, :4], v[2, 5, 0].float().expand(4, -1))
        assert lse[row].isfinite().all()


@IMPLS
@pytest.mark.parametrize("into", [False, True])
def test_pages_are_looked_up_where_their_slots_are_given(impl, into):
    q, k, v, pages, *last = inputs(9, B=3)
    P, rng = len(k), torch.Generator().manual_seed(9)
    ids = torch.randperm(2 * P, generator=rng)[:P].int()  # page ids[i] is at slot i
    slot_of = torch.full((2 * P,), -1, dtype=torch.int32)
    slot_of[ids.long()] = torch.arange(P, dtype=torch.int32)
    away = (slot_of < 0).nonzero()[0].int()  # a page without a slot
    named = ids[pages.clamp(min=0).long()].masked_fill(pages < 0, -1)
    named = torch.where(pages < 0, away, named)
    named[0, 0], pages[0, 0] = -1, -1
    out = poisoned(q) if into else None
    got = attend_pages(q, k, v, named, *last, 0.125, impl=impl, out=out, slot_of=slot_of)
    expected = attend_pages(q, k, v, pages, *last, 0.125, impl=impl)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_triton_looks_up_no_slot_beyond_the_last():
    q, k, v, *_ = inputs(9, B=1)
    slot_of = torch.arange(8, dtype=torch.int32)[:3]  # what lies behind would be a slot
    got = attend_pages(q, k, v, i32([[0, 5, 2]]), None, None, 0.125, impl="triton", slot_of=slot_of)
    expected = attend_pages(q, k, v, i32([[0, 2]]), None, None, 0.125, impl="triton")
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@IMPLS
@pytest.mark.parametrize("columns", [7, 300, 700])
@pytest.mark.parametrize("with_last", [False, True])
def test_a_wide_table_gives_what_its_pages_give(agree, impl, columns, with_last):
    """The tail counts behind a row's own columns, also where there are none."""
    q, k, v, *_ = inputs(11, B=3, P=8)
    last = (i32([5, 6, -1]), i32([1, 2, 1])) if with_last else (None, None)
    n_pages = i32([4, 0, columns])
    pages = torch.full((3, columns), -1, dtype=torch.int32)
    pages[0, :4] = i32([0, -1, 2, 3])
    pages[2, -1], pages[2, columns // 2], pages[2, 0] = 1, 4, 7
    got = attend_pages(q, k, v, pages, *last, 0.125, impl=impl, n_pages=n_pages)
    narrow = i32([[0, 2, 3], [-1, -1, -1], [1, 4, 7]])
    agree(attend_pages, got, attend_pages(q, k, v, narrow, *last, 0.125, impl="reference"))


def test_triton_does_not_look_behind_the_pages_of_a_row():
    q, k, v, *_ = inputs(11, B=1)
    pages = i32([[1, 2, 3, 4]])
    got = attend_pages(q, k, v, pages, None, None, 0.125, impl="triton", n_pages=i32([2]))
    expected = attend_pages(q, k, v, pages[:, :2], None, None, 0.125, impl="triton")
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"last_len": None}, "attend_pages: last_page and last_len come together"),
        ({"logit_cap": -1.0}, "attend_pages: logit_cap is -1.0"),
        ({"q": torch.zeros(3, 5, 64)}, r"attend_pages: q has H\*G=5, expected a multiple of H=2"),
    ],
)
def test_malformed_arguments_are_named(change, message):
    names = ("q", "k", "v", "pages", "last_page", "last_len")
    arguments = dict(zip(names, inputs(1), strict=True)) | {"scale": 1.0} | change
    with pytest.raises(ValueError, match=message):
        attend_pages(**arguments)


NATIVE = pytest.mark.parametrize("impl", ["native"])


@NATIVE
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pages", 7, "a page id of row 0 is not below num_pages=7"),
        ("pages", 2**31 - 1, "a page id of row 0"),
        ("last_page", 7, "last_page=7"),
        ("last_len", 0, "last_len=0"),
        ("last_len", 9, "last_len=9"),
    ],
)
def test_native_refuses_what_would_read_outside(impl, name, value, message):
    names = ("q", "k", "v", "pages", "last_page", "last_len")
    arguments = dict(zip(names, inputs(1), strict=True))
    arguments["last_page"][0] = 0
    arguments[name].view(-1)[0] = value
    with pytest.raises(ValueError, match=message):
        attend_pages(**arguments, scale=1.0, impl=impl)


@NATIVE
def test_native_names_every_reason(impl, agree):
    q, k, v, pages, *last = inputs(1, D=24)
    with pytest.raises(ImplementationError) as caught:
        attend_pages(q, k.double(), v.double(), pages.T.contiguous().T, *last, 1.0, impl=impl)
    message = str(caught.value)
    assert "native supports float32, bfloat16, float16" in message
    assert "pages is not contiguous" in message
    assert "D=24; native supports multiples of 16" in message
    assert "float64[7, 8, 2, 24]" in message
    got = attend_pages(q, k, v, pages, *last, 0.125)  # what it lacks runs on the reference
    agree(attend_pages, got, densely(q, k, v, pages, *last, 0.125))


@NATIVE
@pytest.mark.usefixtures("isa")
def test_more_heads_than_one_pass_holds(impl, agree):
    q, k, v, pages, *last = inputs(11, 1, 3, 16, 40, 8, 128, 3, torch.bfloat16)
    got = attend_pages(q, k, v, pages, *last, 0.1, impl=impl)
    agree(attend_pages, got, densely(q, k, v, pages, *last, 0.1), torch.bfloat16)


@NATIVE
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_widened_exactly(impl, dtype):
    """With one token the result is V itself, in order, for all finite bit patterns."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    v = torch.where(patterns.isfinite(), patterns, 0.0).reshape(1, 1, 512, 128).contiguous()
    q, k = torch.ones(1, 512, 128), torch.zeros_like(v)
    out, lse = attend_pages(q, k, v, i32([[0]]), None, None, 1.0, impl=impl)
    assert torch.equal(out.reshape(v.shape), v.float())
    assert (lse == 0).all()


@NATIVE
@pytest.mark.usefixtures("isa")
def test_a_query_is_not_rounded_to_the_dtype_of_the_pages(impl):
    k, q = torch.ones(1, 1, 1, 64).bfloat16(), torch.ones(1, 2, 64)
    q[0, 1] += 2.0**-12
    _, lse = attend_pages(q, k, k, i32([[0]]), None, None, 1.0, impl=impl)
    assert lse.tolist() == [[64.0, 64.0 + 64 * 2.0**-12]]


@NATIVE
@pytest.mark.usefixtures("isa")
def test_products_beyond_float32_stay_finite_and_a_nan_is_not_hidden(impl):
    k = torch.full((2, 16, 1, 64), 3e38)
    k[1] *= -1
    v, q = torch.randn(2, 16, 1, 64), torch.full((1, 2, 64), 3e38)
    q[0, 1] *= -1
    out, lse = attend_pages(q, k, v, i32([[0, 1]]), None, None, 0.125, impl=impl)
    assert lse.isfinite().all()
    torch.testing.assert_close(out[0], v[:, :, 0].mean(1))
    k[1, 5, 0, 7] = math.nan
    out, lse = attend_pages(q, k, v, i32([[1, 0]]), None, None, 0.125, impl=impl)
    assert out.isnan().all() and lse.isnan().all()


# Threads -----------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    """threads(n): from now on."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@NATIVE
def test_a_row_depends_neither_on_threads_nor_on_neighbours(impl, threads):
    """Calls from several threads at once, each with threads of its own, too."""
    k, v = torch.randn(2, 16, 32, 2, 128).bfloat16()
    q, pages = torch.randn(12, 10, 128), torch.stack([torch.randperm(16)[:7] for _ in range(12)])
    pages = pages.int()

    def attend(rows):
        return attend_pages(q[rows], k, v, pages[rows], None, None, 0.1, impl=impl)

    single = [attend(slice(b, b + 1)) for b in range(12)]
    expected = [torch.cat(parts) for parts in zip(*single, strict=True)]
    wrong = []

    def call(times):
        for _ in range(times):
            wrong.extend(
                g for g, e in zip(attend(slice(None)), expected, strict=True) if not g.equal(e)
            )

    for count in (1, 2, 5):
        threads(count)
        call(1)
    callers = [threading.Thread(target=call, args=(20,)) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert not wrong and not any(caller.is_alive() for caller in callers)


@NATIVE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "count"), [(1, 2), (1, 3), (2, 8), (3, 2), (3, 8)])
def test_threads_share_a_sequence(impl, agree, threads, dtype, rows, count):
    """Few sequences of many large pages, with holes in the lists and partial pages behind them."""
    q, k, v, _, _, _ = inputs(rows, rows, 12, 32, 8, 2, 128, 1, dtype)
    pages = torch.randint(0, 12, (rows, 40), dtype=torch.int32)
    pages[0, :9] = pages[0, 20:25] = -1
    if rows > 1:
        pages[1] = -1  # nothing but the partial page
    arguments = q, k, v, pages, i32([3, 4, -1][:rows]), i32([5, 32, 0][:rows]), 0.1
    threads(1)
    alone = attend_pages(*arguments, impl=impl)
    threads(count)
    shared, again = (attend_pages(*arguments, impl=impl) for _ in range(2))
    agree(attend_pages, shared, densely(*arguments), dtype)
    assert all(torch.equal(a, b) for a, b in zip(shared, again, strict=True))
    pages_of = (pages >= 0).sum(1)
    split = Split(count, 16, least_pages=4 if dtype == torch.bfloat16 else 2)
    batch = int((pages_of > 0).sum()), int(pages_of.sum()), int(pages_of.max())
    runs = native.module.split_runs(*split, *batch)
    assert torch.equal(shared[0], alone[0]) == (runs == 1)  # split: sums in another order


@NATIVE
def test_a_nan_in_one_run_is_not_lost(impl, threads):
    threads(4)
    k = torch.zeros(8, 32, 8, 128)
    k[5, 3, 2, 7] = math.nan
    q, pages = torch.ones(1, 8, 128), torch.arange(8, dtype=torch.int32)[None]
    out, lse = attend_pages(q, k, k.nan_to_num(), pages, None, None, 1.0, impl=impl)
    assert out[0, 2].isnan().all() and lse[0, 2].isnan()
    assert not out[0, :2].isnan().any() and not lse[0, 3:].isnan().any()


FORK = """
import os, signal, torch
from sglang_scout.ops.attend import attend_pages

def attend():
    kv, pages = torch.ones(4, 16, 1, 64), torch.arange(16).int().view(4, 4) % 4
    torch.set_num_threads(3)
    out, _ = attend_pages(torch.ones(4, 2, 64), kv, kv, pages, None, None, 1.0, impl="native")
    assert (out == 1).all()

attend()
child = os.fork()
if child == 0:
    signal.alarm(20)
    attend()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
attend()
"""


@pytest.mark.skipif(native.module is None, reason=native.ABSENT)
def test_the_thread_pool_survives_a_fork():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(native.module is None, reason=native.ABSENT)
def test_the_best_instruction_set_is_the_default():
    code = "from sglang_scout import _native as n; print(n.isa(), n.best_isa())"

    def shown(value):
        env = {k: x for k, x in os.environ.items() if k != "SCOUT_ISA"} | value
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), done.stderr

    best = native.module.best_isa()
    assert shown({}) == ([best, best], "")
    assert shown({"SCOUT_ISA": "portable"}) == (["portable", best], "")
    used, said = shown({"SCOUT_ISA": "sse9"})
    assert used == [best, best] and "SCOUT_ISA=sse9 is unknown" in said
    with pytest.raises(ValueError, match="sse9"):
        native.module.set_isa("sse9")


@pytest.mark.skipif(native.module is None, reason=native.ABSENT)
@pytest.mark.parametrize("size", [{"dtype": 3}, {"D": 24}, {"D": 0}, {"S": 0}, {"G": -1}])
def test_addresses_without_a_shape_are_refused(size):
    """What an op cannot ask for, but another caller of the module could."""
    zeros = torch.zeros(4096)
    pointers = {f"{name}_ptr": zeros.data_ptr() for name in ("q", "k", "v", "pages", "out", "lse")}
    sizes = {"num_pages": 2, "S": 16, "H": 1, "D": 16, "dtype": 0, "G": 1, "B": 1, "R": 2} | size
    last = {"last_page_ptr": 0, "last_len_ptr": 0, "scale": 1.0, "logit_cap": 0.0}
    (name,) = size
    with pytest.raises(ValueError, match=f"{name}={size[name]}"):
        native.module.attend_batch(**pointers, **sizes, **last)
