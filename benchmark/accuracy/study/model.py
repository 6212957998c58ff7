"""A Llama-, Qwen2- or Qwen3-shaped decoder of transformers in float32, one layer at a time.

Shapes: T tokens, d hidden size, HQ query heads, H key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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

    @classmethod
    def of(cls, folder: Path) -> Config:
        """Raises ValueError for an unsupported architecture."""
        from transformers import AutoConfig

        raw = AutoConfig.from_pretrained(folder)
        if raw.model_type not in MODEL_TYPES:
            known = ", ".join(MODEL_TYPES)
            raise ValueError(f"{folder}: a {raw.model_type}; this study knows {known}")
        heads = raw.num_attention_heads
        head_dim = getattr(raw, "head_dim", None) or raw.hidden_size // heads
        return cls(raw.num_hidden_layers, heads, raw.num_key_value_heads, head_dim)


class Model:
    """The model in ``folder``, and the parts of one layer's computation on its input ``x`` ``[T, d]``."""

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.config = Config.of(Path(folder))
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._whole: Any = whole.requires_grad_(False)
        self._layers: Any = whole.model.layers
        self.scale = self.config.head_dim**-0.5
        self.trained: dict[str, Tensor] = {}  # weights that select pages: core/forecast.py

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, d]."""
        return self._whole.model.embed_tokens(tokens)

    def normed(self, layer: int, x: Tensor) -> Tensor:
        """[T, d]: the input of this layer's projections."""
        return self._layers[layer].input_layernorm(x)

    def weight(self, layer: int, name: str) -> Tensor:
        return self._layers[layer].get_submodule(name).weight

    def query(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        """[T, HQ, D] after this layer's norm, q-norm and RoPE; ``position`` is [T]."""
        return self._heads(layer, "q", x, position)

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
        v = self._layers[layer].self_attn.v_proj(self.normed(layer, x))
        k = self._heads(layer, "k", x, position)
        return k.transpose(0, 1), v.view(k.shape).transpose(0, 1)

    def after_attention(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        """The next layer's input; ``attended`` is [T, HQ, D]."""
        own = self._layers[layer]
        x = x + own.self_attn.o_proj(attended.flatten(1))
        return x + own.mlp(own.post_attention_layernorm(x))

    def log_probs(self, x: Tensor) -> Tensor:
        """[T, V] from the last layer's output."""
        return self._whole.lm_head(self._whole.model.norm(x)).log_softmax(-1)

    def prefill(
        self, tokens: Tensor, see: Callable[[int, Tensor, Tensor, Tensor], None] | None = None
    ) -> tuple[KV, Tensor]:
        """KV and the last layer's output [T, d] with full attention.

        Args:
            see: called with each layer's number, input [T, d], queries [T, HQ, D] and keys [H, T, D].
        """
        position = torch.arange(len(tokens))
        x, kv = self.embed(tokens), []
        for layer in range(self.config.layers):
            q = self.query(layer, x, position)
            k, v = self.keys_values(layer, x, position)
            if see is not None:
                see(layer, x, q, k)
            out = torch.empty_like(q).transpose(0, 1)
            for rows in position.split(PREFILL_ROWS):
                end = int(rows[-1]) + 1
                part = F.scaled_dot_product_attention(
                    q[rows].transpose(0, 1)[None],
                    k[None, :, :end],
                    v[None, :, :end],
                    attn_mask=position[:end] <= rows[:, None],
                    enable_gqa=True,
                )
                out[:, rows] = part[0]
            x = self.after_attention(layer, x, out.transpose(0, 1))
            kv.append((k, v))
        return kv, x

    def _heads(self, layer: int, which: str, x: Tensor, position: Tensor) -> Tensor:
        own = self._layers[layer].self_attn
        y = getattr(own, f"{which}_proj")(self.normed(layer, x))
        y = y.view(len(x), -1, self.config.head_dim)
        norm = getattr(own, f"{which}_norm", None)
        return self.rope(y if norm is None else norm(y), position)

    def rope(self, y: Tensor, position: Tensor) -> Tensor:
        """[..., T, heads, D], rotated; ``position`` is [T]."""
        cos, sin = (x[0, :, None] for x in self._whole.model.rotary_emb(y, position[None]))
        a, b = y.chunk(2, -1)
        return y * cos + torch.cat([-b, a], -1) * sin
