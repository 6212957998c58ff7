"""Initial weights for training the small retrieval model."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.accuracy import vocabulary
from benchmark.accuracy.recall_training.model import RecallModel


def init_weights(model: RecallModel, seed: int) -> None:
    """Overwrites all weights with seeded ones, with hand-written heads (induction heads) in two layers.

    The embeddings share one direction, which three heads of layer 0 turn into fixed rotary queries and keys that read
    the tokens 1, 2 and 3 positions back into separate subspaces. Layer 1 compares the tokens 0, 1, 2 positions before
    the query with those 1, 2, 3 positions before the key, and copies the token found. Such a network learns these
    heads by itself, but that takes most of the training.
    """
    spec = model.spec
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=rng) * std

    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.fill_(1.0)
            elif "o_proj" in name or "down_proj" in name:
                p.copy_(normal(*p.shape, std=0.5 / math.sqrt(p.shape[1] * 2 * spec.layers)))
            elif "embed" in name:
                p.copy_(normal(*p.shape, std=0.02))
            else:
                p.copy_(normal(*p.shape, std=1 / math.sqrt(p.shape[1])))
        _write_induction_heads(model, normal, _write_shift_heads(model, normal))


def _write_shift_heads(model: RecallModel, normal: Any) -> tuple[Tensor, ...]:
    """Returns the subspaces [d, D] of the tokens 0, 1, 2 and 3 positions back."""
    spec, d, D = model.spec, model.spec.hidden, model.spec.head_dim
    half = D // 2
    basis, _ = torch.linalg.qr(normal(d, d))
    parts = basis.split(D, dim=1)  # four subspaces [d, D]
    common = parts[0][:, :1]
    embed = model.model.embed_tokens.weight
    codes = F.normalize(normal(embed.shape[0], D - 1), dim=1)
    codes[: vocabulary.WORD_BASE] *= 0.1  # special tokens and bytes: never trained, nearly equal
    embed.copy_(0.5 * (codes @ parts[0][:, 1:].T) + 0.35 * common.T + 0.1 * embed)
    attn = model.model.layers[0].self_attn
    pairs = torch.arange(half)
    frequency = spec.rope_base ** (-pairs / half)
    strength = (pairs < 8).float()

    def pattern(offset: int) -> Tensor:
        """[D]: rotated by RoPE, it matches the constant key ``offset`` tokens ago."""
        angle = offset * frequency
        return torch.cat((strength * angle.cos(), -strength * angle.sin()))

    for kv in range(spec.kv_heads):
        rows = slice(kv * D, (kv + 1) * D)
        attn.k_proj.weight[rows] = pattern(0)[:, None] @ common.T + normal(D, d, std=0.005)
        attn.v_proj.weight[rows] = parts[0].T
        attn.v_proj.weight[kv * D] = 0
    for head in range(min(3, spec.heads)):
        rows = slice(head * D, (head + 1) * D)
        attn.q_proj.weight[rows] = pattern(head + 1)[:, None] @ common.T + normal(D, d, std=0.005)
        attn.o_proj.weight[:, rows] = 0.06 * parts[head + 1]
    attn.q_norm.weight.fill_(3.0)
    attn.k_norm.weight.fill_(3.0)
    return parts


def _write_induction_heads(model: RecallModel, normal: Any, parts: tuple[Tensor, ...]) -> None:
    spec, D = model.spec, model.spec.head_dim
    half = D // 2
    attn = model.model.layers[1].self_attn
    slow = (torch.arange(D) % half >= half // 2).float()[:, None]  # dimensions that hardly rotate
    group = spec.heads // spec.kv_heads
    for kv in range(spec.kv_heads):
        maps = [slow * normal(D, D, std=1 / math.sqrt(D)) for _ in range(3)]
        rows = slice(kv * D, (kv + 1) * D)
        key = sum(m @ part.T for m, part in zip(maps, parts[1:4], strict=True))
        attn.k_proj.weight[rows] = key + normal(*key.shape, std=0.005)
        attn.v_proj.weight[rows] = parts[0].T
        attn.v_proj.weight[kv * D] = 0
        maps[0][:, 0] = 0  # excludes the direction shared by all tokens
        query = sum(m @ part.T for m, part in zip(maps, parts[0:3], strict=True))
        for head in range(kv * group, (kv + 1) * group):
            rows = slice(head * D, (head + 1) * D)
            attn.q_proj.weight[rows] = query + normal(*query.shape, std=0.005)
            attn.o_proj.weight[:, rows] = 0.1 * parts[0]
    attn.q_norm.weight.fill_(1.7)
    attn.k_norm.weight.fill_(1.7)
