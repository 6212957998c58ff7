"""Predicted queries from SGLang's own projection layers: unquantised weights, and those that cannot be sliced."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from sglang.srt.layers import linear

from page_weights import forecast_weights, identity
from sglang_scout.core.errors import ConfigError
from sglang_scout.engine.policy import QuerySource, Residency, SelectionRule
from sglang_scout.ops import triton
from sglang_scout.ops.predict import add_norm, rms_norm, rotate_heads, rotate_heads_reference
from sglang_scout.plugin import model
from sglang_scout.plugin.hooks import VERSION

HIDDEN, HQ, H, D, TOKENS = 96, 6, 2, 64, 5
Q, ALL = HQ * D, (HQ + 2 * H) * D


class RotatedInput(model.UnquantizedLinearMethod):
    """Keeps a float weight, as some quantisation methods do, but transforms the input before the product."""

    def apply(self, layer, x, bias=None):
        return super().apply(layer, x.flip(-1), bias)


class Rope(model.RotaryEmbedding):
    """SGLang's class with its own table: the constructor would need a running server."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        angle = torch.outer(torch.arange(128.0), 10000 ** -(torch.arange(0, D, 2) / D))
        self.cos_sin_cache = torch.cat((angle.cos(), angle.sin()), -1)
        self.rotary_dim, self.is_neox_style = D, True


def norm(size, rng):
    made = model.RMSNorm(size)
    made.weight.data = torch.rand(size, generator=rng) + 0.5
    return made


def attention_layer(method=None, bias=True, q_norm=True, skip_bias_add=False, tp=1):
    """A decoder layer as `make_projector` sees it, of rank ``tp - 1`` of ``tp``, and its weights."""
    rng = torch.Generator().manual_seed(3)
    group = SimpleNamespace(rank_in_group=tp - 1, world_size=tp)
    options = {"bias": bias, "skip_bias_add": skip_bias_add}
    if VERSION == "0.5.15.post1":  # else it looks up the group
        options |= {"tp_rank": tp - 1, "tp_size": tp}
    with patch.object(linear, "_resolve_linear_group", lambda _: group, create=True):
        projection = linear.QKVParallelLinear(HIDDEN, D, HQ * tp, H * tp, **options)
    weight, shift = torch.randn(ALL, HIDDEN, generator=rng), torch.randn(ALL, generator=rng)
    projection.weight.data.copy_(weight)
    if bias:
        projection.bias.data.copy_(shift)
    projection.quant_method = method or projection.quant_method
    projection.quant_method.process_weights_after_loading(projection)
    attention = SimpleNamespace(
        qkv_proj=projection, rotary_emb=Rope(), q_size=Q, num_heads=HQ, head_dim=D
    )
    if q_norm:
        attention.q_norm = norm(D, rng)
    layer = SimpleNamespace(self_attn=attention, input_layernorm=norm(HIDDEN, rng))
    return layer, weight, shift if bias else None


def predicted(layer, weight, bias, x, residual, positions, norm=None, heads=HQ, norm_heads=True):
    """By the formula, with the query rows of this weight."""
    attention, norm = layer.self_attn, norm or layer.input_layernorm
    q_norm = getattr(attention, "q_norm", None) if norm_heads else None
    x = rms_norm(x + residual, norm.weight, norm.variance_epsilon)
    q = torch.nn.functional.linear(x, weight[: heads * D], None if bias is None else bias[:Q])
    by = (None, 0.0) if q_norm is None else (q_norm.weight, q_norm.variance_epsilon)
    rotation = attention.rotary_emb.cos_sin_cache, positions, D, True, heads, D
    return rotate_heads_reference(q, *by, *rotation)


def predict(projector, x, residual, positions):
    return projector.finish(projector.start(x, residual), positions)


@pytest.fixture
def token():
    rng = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, TOKENS, HIDDEN, generator=rng)
    return *hidden, torch.randint(0, 128, (TOKENS,), generator=rng)


@pytest.mark.parametrize(
    "given", [{}, {"bias": False}, {"q_norm": False}, {"skip_bias_add": True}, {"tp": 2}]
)
@pytest.mark.parametrize("method", [None, RotatedInput()])
def test_plain_weights_are_sliced_and_others_go_through_the_module(agree, token, method, given):
    layer, weight, bias = attention_layer(method, **given)
    calls = []
    layer.self_attn.qkv_proj.register_forward_hook(lambda *_: calls.append(1))
    got = predict(model.make_projector(0, layer), *token)
    weight = weight.flip(-1) if method else weight
    agree(rotate_heads, got, predicted(layer, weight, bias, *token))
    assert calls == ([1] if method else [])


@pytest.mark.skipif(not triton.interpreted(), reason="needs Triton's interpreter")
def test_a_projection_that_is_not_sliced_is_one_product(token):
    from launches import Launches  # imports triton

    layer, *_ = attention_layer(RotatedInput(), bias=False)
    project = model.make_projector(0, layer)
    with Launches() as counted:
        predict(project, *token)
    assert counted.names == ["norm_kernel", "flip", "mm", "rotate_kernel"]


@pytest.mark.sparda
def test_a_forecast_is_one_vector_per_kv_head_by_the_norm_of_the_layer_before(agree, token):
    from sglang_scout.policy.learned import Means
    from sglang_scout.policy.learned.sparda import SparDA

    layers = [attention_layer()[0] for _ in range(3)]
    weights = forecast_weights(identity(3, HQ, H, D), HIDDEN)
    layers[0].input_layernorm.weight.data *= 3
    rule = SelectionRule(Means, weights)
    policy = SparDA("", rule, QuerySource(attends=False), "fetch", Residency())
    own = [model.make_projector(0, layer) for layer in layers]
    for target, project in enumerate(policy.projectors(own)):
        norm, w = layers[max(target - 1, 0)].input_layernorm, weights.arrays["w"][target]
        got = predict(project, *token)
        assert got.shape == (TOKENS, H, D)
        expected = predicted(layers[target], torch.from_numpy(w), None, *token, norm, H, False)
        agree(rotate_heads, got, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_weight_of_another_dtype_is_not_sliced(token, dtype):
    layer, *_ = attention_layer()
    projection = layer.self_attn.qkv_proj
    projection.weight.data = projection.weight.data.to(dtype)
    projection.forward = lambda x: (x.new_ones(len(x), ALL), None)
    del layer.self_attn.q_norm
    x, residual, positions = token
    got = predict(model.make_projector(0, layer), x, residual, torch.zeros_like(positions))
    assert got.eq(1).all()


@pytest.mark.parametrize("what", ["qkv_proj", "rotary_emb"])
def test_a_layer_without_the_expected_parts_is_refused(what):
    layer, *_ = attention_layer()
    setattr(layer.self_attn, what, None)
    with pytest.raises(ConfigError, match=f"layer 0 .* unexpected {what}"):
        model.make_projector(0, layer)


def shape_of(kv_dtype, monkeypatch, logit_cap=0, **scales):
    kind = {"scaling": 0.1, "sliding_window_size": -1, "attn_type": "any", "logit_cap": logit_cap}
    attention = SimpleNamespace(**kind, tp_q_head_num=4, layer_id=2, **scales)
    monkeypatch.setattr(model, "get_attn_tp_group", lambda: SimpleNamespace(world_size=1))
    layers = [SimpleNamespace(self_attn=SimpleNamespace(attn=attention))]
    config = SimpleNamespace(
        model_path="m", dtype=torch.bfloat16, head_dim=64, get_num_kv_heads=lambda ranks: 2 // ranks
    )
    runner = SimpleNamespace(model_config=config, kv_cache_dtype=kv_dtype, page_size=32)
    runner.model = SimpleNamespace(model=SimpleNamespace(layers=layers))
    return model.model_shape(runner)


@pytest.mark.parametrize("fp8", model.TORCH_FP8)
def test_kv_in_fp8_takes_half_the_bytes(fp8, monkeypatch):
    """With scales absent or set to 1 by SGLang."""
    plain = shape_of(torch.bfloat16, monkeypatch, k_scale=torch.tensor(0.5))
    shape = shape_of(fp8, monkeypatch, k_scale=None, v_scale=torch.tensor(1.0), v_scale_float=1.0)
    assert (shape.kv_dtype, shape.dtype) == (fp8, torch.bfloat16)
    assert 2 * shape.page_bytes == plain.page_bytes


@pytest.mark.parametrize(
    ("kv_dtype", "given", "message"),
    [
        (torch.bfloat16, {"logit_cap": 30.0}, "--model-path m: .*cap their logits"),
        (torch.float16, {}, "would be torch.float16; .* set the flag to fp8_e4m3 or"),
        (torch.float8_e5m2, {"v_scale": 0.5}, "layer 2 has v_scale 0.5; .* --quantization-param"),
        (torch.float8_e5m2, {"v_scale_float": 0.5}, "layer 2 has v_scale 0.5"),
    ],
)
def test_attention_and_kv_of_another_kind_are_refused(monkeypatch, kv_dtype, given, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(kv_dtype, monkeypatch, **given)


def probed(dtype=torch.float32):
    """A probe of two layers, and a layer's input with the query for it."""
    weight, eps = torch.randn(4 * 8, 24, generator=torch.Generator().manual_seed(0)), 1e-6
    start = lambda x, residual: add_norm(x, residual, torch.ones(24), eps) @ weight.T  # noqa: E731
    finish = lambda q, _: q.view(-1, 4, 8).to(dtype)  # noqa: E731
    x, residual = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(1))
    made = model.QueryProbe([SimpleNamespace(start=start, finish=finish)] * 2)
    return made, x, residual, start(x, residual).view(-1, 4, 8)


def test_each_layer_is_compared_once():
    probe, x, residual, q = probed(torch.bfloat16)
    for layer, seen in ((0, residual), (1, residual), (0, None)):
        probe.layer_input(layer, x, seen, torch.arange(3))
        probe.query(layer, q)
    assert not probe.unseen


def test_a_residual_that_is_left_out_is_found_but_memory_that_nobody_has_written_says_nothing():
    probe, x, residual, q = probed()
    probe.layer_input(0, x, residual, torch.arange(3))
    probe.query(0, torch.full_like(q, torch.nan))
    x[1] = q[1] = torch.nan
    probe.layer_input(0, x, None, torch.arange(3))
    with pytest.raises(RuntimeError, match="query of layer 0 differs"):
        probe.query(0, q)
    probe.layer_input(0, x, residual, torch.arange(3))
    probe.query(0, q)
