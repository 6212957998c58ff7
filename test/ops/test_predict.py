import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from implementations import implementations, name_of, usable
from sglang_scout.ops.predict import add_norm_reference, rotate_heads, rotate_heads_reference
from sglang_scout.ops.triton import predict as kernels

IMPLS = implementations(rotate_heads)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def table(max_pos, rotary_dim, base=10000.0):
    frequency = base ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.arange(max_pos)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1)  # [max_pos, rotary_dim]


def case(seed=0, B=3, hidden=48, HQ=4, D=16, rotary_dim=16, bias=True, q_norm=True, max_pos=64,
         is_neox=True, dtype=torch.float32, adds=True):  # fmt: skip
    rng = torch.Generator().manual_seed(seed)

    def random(*shape, scale=1.0):
        return (torch.randn(*shape, generator=rng) * scale).to(dtype)

    return {
        "x": random(B, hidden, scale=3.0),
        "residual": random(B, hidden, scale=3.0) if adds else None,
        "norm_weight": 1 + random(hidden, scale=0.1),
        "norm_eps": 1e-6,
        "w_q": random(HQ * D, hidden, scale=hidden**-0.5),
        "b_q": random(HQ * D) if bias else None,
        "q_norm_weight": 1 + random(D, scale=0.1) if q_norm else None,
        "q_norm_eps": 1e-5,
        "cos_sin": table(max_pos, rotary_dim).to(dtype),
        "positions": torch.randint(0, max_pos, (B,), generator=rng),
        "rotary_dim": rotary_dim,
        "is_neox": is_neox,
        "HQ": HQ,
        "D": D,
    }


def predict_query(c, impl):
    """Like a projector; with a bias the heads are a part of wider rows."""
    norm = usable(kernels.add_norm) if name_of(impl) == "triton" else add_norm_reference
    x = norm(c["x"], c["residual"], c["norm_weight"], c["norm_eps"])
    q = torch.nn.functional.linear(x, c["w_q"], c["b_q"])
    if c["b_q"] is not None:
        q = torch.cat([q, q], 1)[:, : q.shape[1]]
    names = "q_norm_weight q_norm_eps cos_sin positions rotary_dim is_neox HQ D"
    return impl(q, *(c[name] for name in names.split()))


def by_complex_numbers(c):
    """Oracle in float64: a rotated pair is a complex number times cos + i sin."""
    x = c["x"] if c["residual"] is None else c["x"] + c["residual"]
    x = x.double()
    x = x / (x.pow(2).mean(-1, keepdim=True) + c["norm_eps"]).sqrt() * c["norm_weight"].double()
    q = x @ c["w_q"].double().T + (0 if c["b_q"] is None else c["b_q"].double())
    q = q.view(-1, c["HQ"], c["D"])
    if c["q_norm_weight"] is not None:
        q = q / (q.pow(2).mean(-1, keepdim=True) + c["q_norm_eps"]).sqrt()
        q = q * c["q_norm_weight"].double()
    if c["cos_sin"] is None:
        return q
    half = c["rotary_dim"] // 2
    at = c["cos_sin"].double()[c["positions"]]
    turn = torch.complex(at[:, None, :half], at[:, None, half:])
    i = torch.arange(half)
    first, second = (i, i + half) if c["is_neox"] else (2 * i, 2 * i + 1)
    pair = torch.complex(q[..., first], q[..., second]) * turn
    q[..., first], q[..., second] = pair.real, pair.imag
    return q


@IMPLS
@given(
    dtype=st.sampled_from(DTYPES),
    B=st.integers(1, 5),
    HQ=st.integers(1, 6),
    D=st.sampled_from((8, 64, 96, 128)),
    part=st.sampled_from((1, 2, 4)),
    bias=st.booleans(),
    q_norm=st.booleans(),
    is_neox=st.booleans(),
    rotated=st.booleans(),
    adds=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_double_precision(
    agree, impl, dtype, B, HQ, D, part, bias, q_norm, is_neox, rotated, adds, seed
):
    c = case(seed, B, 48, HQ, D, D // part, bias, q_norm, 64, is_neox, dtype, adds)
    if not rotated:
        c["cos_sin"] = None
    got = predict_query(c, impl)
    assert got.dtype == dtype
    assert got.shape == (B, HQ, D)
    agree(rotate_heads, got, by_complex_numbers(c), dtype)


@IMPLS
def test_a_float32_table_is_used_as_it_is(agree, impl):
    """On CUDA, SGLang keeps the table in float32 for a bfloat16 model."""
    c = case(dtype=torch.bfloat16) | {"cos_sin": table(4096, 16)}
    c["positions"] = torch.tensor([4095, 4001, 0])
    agree(rotate_heads, predict_query(c, impl), by_complex_numbers(c), torch.bfloat16)


@pytest.fixture(scope="module")
def sgl():
    """SGLang's own RMSNorm and get_rope, on the CPU."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.runtime_context import get_context
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        pytest.skip("sglang was imported before SGLANG_USE_CPU_ENGINE=1 was set")
    # get_rope reads one field of the global server arguments; restored afterwards.
    context = get_context()
    before, context._server_args = context._server_args, SimpleNamespace(rl_on_policy_target=None)
    yield RMSNorm, get_rope
    context._server_args = before


# Qwen3: head norm, whole head rotated. Llama: neither bias nor head norm. Qwen2: bias.
# GLM4: bias, only half of the head is rotated, and adjacent channels pair.
MODELS = {
    "qwen3": {"bias": False, "q_norm": True, "rotary_dim": 128, "is_neox": True},
    "llama": {"bias": False, "q_norm": False, "rotary_dim": 128, "is_neox": True},
    "qwen2": {"bias": True, "q_norm": False, "rotary_dim": 128, "is_neox": True},
    "glm4": {"bias": True, "q_norm": False, "rotary_dim": 64, "is_neox": False},
}


@IMPLS
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_modules_of_sglang(agree, sgl, impl, model, dtype):
    """Bit-identical to SGLang's norm, head norm and rotation of the same input."""
    RMSNorm, get_rope = sgl
    HQ, D, hidden, max_pos = 4, 128, 256, 512
    c = case(5, 6, hidden, HQ, D, max_pos=max_pos, dtype=dtype, **MODELS[model])

    def norm(weight, eps, x):
        module = RMSNorm(len(weight), eps=eps).to(dtype)
        module.weight.data.copy_(weight)
        return module.forward_native(x)

    # SGLang's norms do not round the sum first.
    c["x"], c["residual"] = c["x"] + c["residual"], None

    with torch.no_grad():
        q = norm(c["norm_weight"], c["norm_eps"], c["x"].clone())
        q = torch.nn.functional.linear(q, c["w_q"], c["b_q"])
        if c["q_norm_weight"] is not None:
            q = norm(c["q_norm_weight"], c["q_norm_eps"], q.view(-1, D)).view(-1, HQ * D)
        rope = get_rope(D, c["rotary_dim"], max_pos, 10000, c["is_neox"], dtype=dtype)
        q, _ = rope.forward_native(c["positions"], q, torch.zeros(6, D, dtype=dtype))
        c["cos_sin"] = rope.cos_sin_cache
        got = predict_query(c, impl)
    if impl is rotate_heads_reference:
        assert torch.equal(got, q.view(-1, HQ, D).float())
    agree(rotate_heads, got, q.view(-1, HQ, D), dtype)
