"""A Llama-, Qwen2- or Qwen3-shaped decoder in plain PyTorch, float32, one layer at a time.

Shapes: T tokens, d hidden size, HQ query heads, H key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

MODEL_TYPES = ("llama", "qwen2", "qwen3")
PREFILL_ROWS = 512  # queries per block: bounds the memory of attention

KV = list[tuple[Tensor, Tensor]]
"""Keys after RoPE and values of each layer, ``[H, T, D]``."""


@dataclass(frozen=True)
class Config:
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float

    @classmethod
    def of(cls, folder: Path) -> Config:
        """Raises ValueError for an unsupported architecture."""
        raw = json.loads((folder / "config.json").read_text())
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        kind = rope.get("rope_type", "default")
        if raw["model_type"] not in MODEL_TYPES or kind != "default":
            raise ValueError(
                f"{folder}: a {raw['model_type']} with {kind} RoPE; this study knows "
                f"{', '.join(MODEL_TYPES)} with default RoPE"
            )
        heads = raw["num_attention_heads"]
        return cls(
            raw["num_hidden_layers"],
            heads,
            raw.get("num_key_value_heads") or heads,
            raw.get("head_dim") or raw["hidden_size"] // heads,
            raw["rms_norm_eps"],
            rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
        )


class Model:
    """The weights in ``folder``, and the parts of one layer's computation on its input ``x`` ``[T, d]``."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.config = Config.of(folder)
        self._weights: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._weights |= {name: x.float() for name, x in load_file(path).items()}
        if not self._weights:
            raise ValueError(f"{folder}: no .safetensors file")
        self.scale = self.config.head_dim**-0.5
        self.trained: dict[str, Tensor] = {}  # weights that select pages: core/forecast.py

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, d]."""
        return self._weights["model.embed_tokens.weight"][tokens]

    def normed(self, layer: int, x: Tensor) -> Tensor:
        """[T, d]: the input of this layer's projections."""
        return self._rms(x, self.weight(layer, "input_layernorm"))

    def weight(self, layer: int, name: str) -> Tensor:
        return self._weights[f"model.layers.{layer}.{name}.weight"]

    def query(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        """[T, HQ, D] after this layer's norm, q-norm and RoPE; ``position`` is [T]."""
        return self._heads(layer, "q", self.config.q_heads, x, position)

    def forecast(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        """[T, HQ, D]: forecast for this layer's pages from the input ``x`` of the previous layer (layer 0: its own)."""
        y = F.linear(self.normed(max(layer - 1, 0), x), self.trained["w"][layer])
        group = self.config.q_heads // self.config.kv_heads
        made = self.rope(y.view(len(x), self.config.kv_heads, -1), position)
        return made.repeat_interleave(group, 1)

    def file_of(self, digest: str, layer: int) -> tuple[Tensor, ...]:
        """A layer's arrays of the digest's file, if it has one that is there."""
        names = ("w_k", "w_q") if digest == "pilot" else ()
        return tuple(self.trained[name][layer] for name in names if name in self.trained)

    def keys_values(self, layer: int, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """[H, T, D] each; keys after k-norm and RoPE."""
        heads = self.config.kv_heads
        k = self._heads(layer, "k", heads, x, position)
        v = self._linear(layer, "self_attn.v_proj", self.normed(layer, x))
        return k.transpose(0, 1), v.view(len(x), heads, -1).transpose(0, 1)

    def after_attention(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        """The next layer's input; ``attended`` is [T, HQ, D]."""
        x = x + self._linear(layer, "self_attn.o_proj", attended.flatten(1))
        y = self._rms(x, self.weight(layer, "post_attention_layernorm"))
        up = F.silu(self._linear(layer, "mlp.gate_proj", y)) * self._linear(layer, "mlp.up_proj", y)
        return x + self._linear(layer, "mlp.down_proj", up)

    def log_probs(self, x: Tensor) -> Tensor:
        """[T, V] from the last layer's output."""
        out = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])
        return (self._rms(x, self._weights["model.norm.weight"]) @ out.T).log_softmax(-1)

    def prefill(
        self, tokens: Tensor, see: Callable[[int, Tensor, Tensor, Tensor], None] | None = None
    ) -> tuple[KV, Tensor]:
        """KV and the last layer's output [T, d] with full attention.

        Args:
            see: called with each layer's number, input [T, d], queries [T, HQ, D] and keys [H, T, D].
        """
        position = torch.arange(len(tokens))
        x, kv = self.embed(tokens), []
        group = self.config.q_heads // self.config.kv_heads
        for layer in range(self.config.layers):
            q = self.query(layer, x, position).transpose(0, 1)
            k, v = self.keys_values(layer, x, position)
            if see is not None:
                see(layer, x, q.transpose(0, 1), k)
            wide = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            out = torch.empty_like(q)
            for begin in range(0, len(tokens), PREFILL_ROWS):
                end = min(begin + PREFILL_ROWS, len(tokens))
                mask = position[:end] <= position[begin:end, None]
                seen = (t[None, :, :end] for t in wide)
                part = F.scaled_dot_product_attention(q[None, :, begin:end], *seen, attn_mask=mask)
                out[:, begin:end] = part[0]
            x = self.after_attention(layer, x, out.transpose(0, 1))
            kv.append((k, v))
        return kv, x

    def _heads(self, layer: int, which: str, heads: int, x: Tensor, position: Tensor) -> Tensor:
        y = self._linear(layer, f"self_attn.{which}_proj", self.normed(layer, x))
        y = y.view(len(x), heads, -1)
        norm = self._weights.get(f"model.layers.{layer}.self_attn.{which}_norm.weight")
        return self.rope(y if norm is None else self._rms(y, norm), position)

    def rope(self, y: Tensor, position: Tensor) -> Tensor:
        """[..., T, heads, D], rotated; ``position`` is [T]."""
        half = self.config.head_dim // 2
        frequency = self.config.rope_theta ** (-torch.arange(half) / half)
        angle = (position[:, None] * frequency)[:, None]  # [T, 1, D/2]
        a, b = y[..., :half], y[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        bias = self._weights.get(f"model.layers.{layer}.{name}.bias")
        return F.linear(x, self.weight(layer, name), bias)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)
