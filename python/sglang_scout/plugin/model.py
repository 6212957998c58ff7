"""What the plugin reads of SGLang's loaded model: its identity, shape and layers; queries from its weights, and a probe
whether they are right."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_attn_tp_group
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding
from transformers.utils.hub import cached_file

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import DTYPES, FP8_KV
from sglang_scout.core.profile import ModelIdentity, config_digest, load_profile
from sglang_scout.engine.ahead import QueryHeads, QueryProjector
from sglang_scout.engine.policy import Policy
from sglang_scout.engine.stores import ModelShape
from sglang_scout.plugin.hooks import adapter
from sglang_scout.policy import Context, make_policy

TORCH_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
TORCH_FP8 = tuple(getattr(torch, name) for name in FP8_KV.values())
MAX_QUERY_ERROR = 0.1
"""Relative, over all queries of a layer. Rounding causes up to 0.01, omitting the residual stream about 1."""


def rank_policy(config: OffloadConfig, shape: ModelShape) -> Policy:
    """The configured policy, with the part of its weights for this tensor-parallel rank's heads."""
    profile = load_profile(path) if (path := config.recall_profile) else None
    policy = make_policy(Context(config, shape.num_layers, 2 * shape.page_bytes, profile))
    if (weights := policy.rule.weights) is None:
        return policy
    group = get_attn_tp_group()
    weights = weights.of_rank(group.rank_in_group, group.world_size)
    return replace(policy, rule=replace(policy.rule, weights=weights))


def model_identity(config: Any) -> ModelIdentity:
    """Identity of the model in SGLang's ``ModelConfig``, independent of its folder. Raises ConfigError if it has no
    readable config.json."""
    try:
        file = cached_file(config.model_path, "config.json", revision=config.revision)
        digest = config_digest(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        message = f"--model-path {config.model_path}: cannot read its config.json: {error}"
        raise ConfigError(f"{message}; copy the model's own file there") from error
    architecture = (config.hf_config.architectures or ["(none named)"])[0]
    heads = config.num_attention_heads, config.get_total_num_kv_heads(), config.head_dim
    return ModelIdentity(architecture, config.num_hidden_layers, *heads, digest)


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return list(model.model.layers)  # type: ignore[union-attr, arg-type]


def before_layer(index: int, *see: Callable[..., None]) -> Callable[..., Any]:
    """A forward pre-hook, with keywords, of decoder layer ``index``: in decode steps each of ``see`` is called with the
    arguments of ``StepEngine.layer_input``."""

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("positions", "hidden_states", "forward_batch", "residual")
        given = dict(zip(names, args, strict=False)) | kwargs
        batch, handed = given["forward_batch"], given["hidden_states"]
        if not batch.forward_mode.is_decode():
            return None
        hidden, residual = adapter.layer_input(handed, batch, given.get("residual"))
        for call in see:
            call(index, hidden, residual, given["positions"])
        return None if hidden is handed else ((), given | {"hidden_states": hidden})

    return hook


def model_shape(runner: Any) -> ModelShape:
    """Attention shape on this rank, read from the loaded model."""
    config = runner.model_config
    attentions = [layer.self_attn.attn for layer in decoder_layers(runner.model)]  # type: ignore[union-attr]
    kinds = {(a.scaling, a.sliding_window_size, a.attn_type, a.logit_cap) for a in attentions}
    first = attentions[0]
    if len(kinds) != 1 or first.sliding_window_size > 0 or first.logit_cap:
        raise ConfigError(
            f"--model-path {config.model_path}: its layers differ in scaling or kind, cap their logits or "
            "use sliding-window attention; serve it without --kv-offload, or choose another model"
        )
    fp8 = None if runner.kv_cache_dtype == config.dtype else runner.kv_cache_dtype
    if fp8 is not None:
        _check_fp8(config.model_path, fp8, config.dtype, attentions)
    kv_heads = config.get_num_kv_heads(get_attn_tp_group().world_size)
    sizes = len(attentions), first.tp_q_head_num, kv_heads, config.head_dim, runner.page_size
    return ModelShape(*sizes, config.dtype, float(first.scaling), fp8)


def _check_fp8(model_path: str, fp8: torch.dtype, dtype: torch.dtype, layers: list[Any]) -> None:
    """SGLang takes the dtype from its flag or from the checkpoint, which may also have scales."""
    if fp8 not in TORCH_FP8:
        raise ConfigError(
            f"--kv-cache-dtype: KV of --model-path {model_path} would be {fp8}; --kv-offload keeps it in the model's "
            f"dtype, {dtype} (auto), or in fp8: set the flag to {' or '.join(FP8_KV)}"
        )
    for layer, name in itertools.product(layers, ("k_scale", "v_scale")):
        scales = (getattr(layer, x, None) for x in (f"{name}_float", name))
        scale = float(next((x for x in scales if x is not None), 1.0))
        if scale != 1.0:
            raise ConfigError(
                f"--kv-cache-dtype: layer {layer.layer_id} has {name} {scale:g}; --kv-offload stores K and V unscaled; "
                "drop --quantization-param-path, or serve a checkpoint without KV scales"
            )


def make_projector(index: int, layer: Any) -> QueryProjector:
    """What computes a layer's query from a layer input: the layer's own norm, W_q, head norm and RoPE."""
    attention, norm = layer.self_attn, layer.input_layernorm
    rope, projection = attention.rotary_emb, getattr(attention, "qkv_proj", None)
    parts = {
        "input_layernorm": type(norm) is RMSNorm,
        "rotary_emb": isinstance(rope, RotaryEmbedding)
        and not isinstance(rope, MRotaryEmbedding)
        and rope.rotary_dim in range(2, attention.head_dim + 1, 2),
        "qkv_proj": callable(projection),
    }
    if wrong := [what for what, is_known in parts.items() if not is_known]:
        raise ConfigError(
            f"--kv-offload: layer {index} of {type(layer).__name__} has an unexpected {wrong[0]}; serve this model "
            "without --kv-offload"
        )
    q_norm = getattr(attention, "q_norm", None)
    heads = QueryHeads(
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        rotary_dim=rope.rotary_dim,
        is_neox=rope.is_neox_style,
        cos_sin=lambda: rope.cos_sin_cache,
        norm_weight=None if q_norm is None else q_norm.weight,
        norm_eps=0.0 if q_norm is None else q_norm.variance_epsilon,
    )
    of_norm = norm.weight, norm.variance_epsilon, heads
    if not _has_plain_rows(projection):
        nbytes = sum(p.nbytes for p in projection.parameters())
        return QueryProjector(*of_norm, quantized=projection, weight_bytes=nbytes)
    w_q, bias = projection.weight[: attention.q_size], projection.bias
    b_q = None if bias is None else bias[: attention.q_size]
    return QueryProjector(*of_norm, w_q, b_q, weight_bytes=w_q.nbytes)


def _has_plain_rows(projection: Any) -> bool:
    """Whether output i depends only on row i of the weight: not quantised, not repacked. A quantisation method may keep
    a float weight and still do more than multiply by it."""
    weight = getattr(projection, "weight", None)
    return (
        type(getattr(projection, "quant_method", None)) is UnquantizedLinearMethod
        and not getattr(projection, "use_intel_amx_backend", False)
        and isinstance(weight, torch.Tensor)
        and type(weight.data) is torch.Tensor
        and weight.dim() == 2
        and weight.dtype in TORCH_DTYPES
    )


class QueryProbe:
    """Checks in the first steps that queries are predicted from the layers' real input: compares each layer's query,
    once, with the output of its projector, of the model's weights.

    SGLang passes a layer its input in parts, which differ between releases. A prediction that lacks one looks like a
    valid query, and selects the wrong pages.
    """

    def __init__(self, projectors: Sequence[QueryProjector]) -> None:
        self.unseen = dict(enumerate(projectors))  # by layer
        self._predicted: torch.Tensor | None = None

    def layer_input(
        self, layer: int, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> None:
        """As of ``StepEngine.layer_input``."""
        projector = self.unseen.get(layer)
        if projector is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._predicted = projector.finish(projector.start(x, residual), positions)

    def query(self, layer: int, q: torch.Tensor) -> None:
        """The layer's real query ``[B, HQ, D]``. Raises RuntimeError if it differs."""
        predicted, self._predicted = self._predicted, None
        if predicted is None:
            return
        finite = q.isfinite().flatten(1).all(1)
        wanted, found = q[finite].float(), predicted[finite].float()
        if not len(wanted):
            return  # KV that was never written
        if not (found - wanted).norm() <= MAX_QUERY_ERROR * wanted.norm():
            raise RuntimeError(
                f"--kv-offload: the query of layer {layer} differs from the one predicted from its own input, so wrong "
                "pages would be selected; install SGLang unmodified, or serve without --kv-offload"
            )
        del self.unseen[layer]
