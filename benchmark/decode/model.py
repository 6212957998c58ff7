"""A decoder of random weights at a model's sizes, the requests that it decodes, and queries that drift from step to
step."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from sglang_scout.engine.step_buffers import Candidates
from sglang_scout.ops.predict import add_norm

if TYPE_CHECKING:
    from benchmark.decode.harness import Store

PAGE = 32
_EPS = 1e-6
FIGURE_6_STEPS, FIGURE_6_SHARE = 8.7, 0.12
"""The paper's Figures 6a and 6b: the mean recall interval, and its threshold."""


class ModelSize(NamedTuple):
    """Sizes of a dense model with grouped-query attention."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @property
    def token_values(self) -> int:
        """Numbers in a token's K and V of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


SIZES = {
    "qwen3-8b": ModelSize(36, 4096, 32, 8, 128, 12288),
    "qwen3-14b": ModelSize(40, 5120, 40, 8, 128, 17408),
    "few-layers": ModelSize(4, 5120, 40, 8, 128, 17408),  # of qwen3-14b, for rehearsals on a device
    "tiny": ModelSize(3, 64, 4, 2, 32, 96),
}
MODELS = ("qwen3-8b", "qwen3-14b")


def write_config(size: ModelSize, folder: Path, context: int) -> Path:
    """A model folder without weights, as needed by ``--load-format dummy``."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": size.layers,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_attention_heads": size.q_heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _EPS,
        "rope_theta": 1e6,
        "max_position_embeddings": context,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Requests:
    """Requests of equal length that decode indefinitely.

    Attributes:
        context: tokens of each at the start, or up to a page more; each gets ``room`` more pages.
        shared_pages: the full pages of all requests are drawn from the store's first ``shared_pages``, so that more
            requests fit than the store has pages for; each has distinct ones, in random order. 0: own pages.
    """

    batch: int
    context: int
    budget_tokens: int
    room: int = 8
    shared_pages: int = 0

    @property
    def max_pages(self) -> int:
        """Of one request."""
        return -(-self.context // PAGE) + self.room

    def pages(self, of_store: int) -> np.ndarray:
        """``[batch, max_pages]`` int32 in a store of so many.

        Raises:
            ValueError: too few.
        """
        own = self.max_pages - (self.context // PAGE if self.shared_pages else 0)
        first = 1 + self.shared_pages
        pages = first + np.arange(self.batch * own, dtype=np.int32).reshape(self.batch, own)
        if pages.max() >= of_store:
            after = f"{self.batch} requests of {own} pages after {self.shared_pages}"
            raise ValueError(f"{after}; the store has {of_store}")
        if not self.shared_pages:
            return pages
        draw, count = np.random.default_rng(4), self.context // PAGE
        drawn = [1 + draw.permutation(self.shared_pages)[:count] for _ in range(self.batch)]
        return np.concatenate([drawn, pages], axis=1, dtype=np.int32)


class DummyModel:
    """Decoder layers with random weights; ``attend`` replaces attention, whose queries the weights do not determine."""

    def __init__(self, size: ModelSize, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self.size = size
        source = torch.Generator(device).manual_seed(seed)
        width = size.q_heads * size.head_dim

        def weights(rows: int, columns: int) -> torch.Tensor:
            shape = (rows, columns)
            made = torch.randn(shape, generator=source, device=device, dtype=torch.float32)
            return made.mul_(columns**-0.5).to(dtype)

        qkv = width + 2 * size.kv_heads * size.head_dim
        self.norm = torch.ones(size.hidden, dtype=dtype, device=device)
        self.layers = [
            (
                weights(qkv, size.hidden),
                weights(size.hidden, width),
                weights(2 * size.intermediate, size.hidden),
                weights(size.hidden, size.intermediate),
            )
            for _ in range(size.layers)
        ]

    def normed(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Applies a layer's norm, which is the same for all."""
        return add_norm(x, residual, self.norm, _EPS)

    def project_q(self, layer: int, normed: torch.Tensor) -> torch.Tensor:
        """``[B, HQ, D]`` query of ``layer`` from any layer input after :meth:`normed`."""
        width = self.size.q_heads * self.size.head_dim
        q = normed @ self.layers[layer][0][:width].T
        return q.view(len(normed), self.size.q_heads, self.size.head_dim)

    def forward(self, x: torch.Tensor, before_layer: Any, attend: Any) -> torch.Tensor:
        """``before_layer(layer, x)``; ``attend(layer, q, k, v)`` gives ``[B, HQ, D]``."""
        size = self.size
        heads = [size.q_heads, size.kv_heads, size.kv_heads]
        for layer, (w_qkv, w_out, w_up, w_down) in enumerate(self.layers):
            before_layer(layer, x)
            qkv = self.normed(x) @ w_qkv.T
            q, k, v = qkv.view(len(x), -1, size.head_dim).split(heads, dim=1)
            out = attend(layer, q, k, v).to(x.dtype)
            x = x + out.flatten(1) @ w_out.T
            gate, up = (self.normed(x) @ w_up.T).chunk(2, dim=1)
            x = x + (torch.nn.functional.silu(gate) * up) @ w_down.T
        return x


class QueryDrift:
    """Queries of all layers and rows: q(t+1) = rho q(t) + sqrt(1 - rho^2) noise, seeded.

    With rho = 1 the important pages never change, with 0 they are new in every step. Attributes:
        q: ``[L, B, HQ, D]`` fp32, of the next step; at a fixed address.
    """

    def __init__(self, size: ModelSize, batch: int, rho: float, device: str, seed: int = 1) -> None:
        self._source = torch.Generator(device).manual_seed(seed)
        self._device, self.rho = device, rho
        shape = (size.layers, batch, size.q_heads, size.head_dim)
        self.q = torch.randn(shape, generator=self._source, device=device)

    def turn(self, factor: float) -> None:
        """Let queries turn by ``factor`` times the angle per step."""
        self.rho = math.cos(min(factor * math.acos(self.rho), math.pi / 2))

    def advance(self) -> None:
        noise = torch.randn(self.q.shape, generator=self._source, device=self._device)
        self.q.mul_(self.rho).add_(noise, alpha=(1 - self.rho**2) ** 0.5)


def calibrated_rho(store: Store, context: int, budget_pages: int) -> float:
    """The rho at which, with the store's digests, Figure 6's share of a selection changes in its number of steps."""
    pages, size = context // store.shape.page_size, store.size
    table = torch.arange(1, pages + 1, dtype=torch.int32, device=store.device)[None]
    n_full = torch.full((1,), pages, dtype=torch.int32, device=store.device)
    candidates = Candidates.of(table, n_full, 1)
    layers = range(0, size.layers, max(1, size.layers // 4))
    source = torch.Generator(store.device).manual_seed(1)
    shape = (2, len(layers), 1, size.q_heads, size.head_dim)
    q, noise = torch.randn(shape, generator=source, device=store.device)

    def chosen(queries: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for layer, query in zip(layers, queries, strict=True):
            scores = store.digests.score(layer, query, candidates, store.shape.scale)
            found.append(scores[0].topk(min(budget_pages, pages)).indices)
        return found

    before = chosen(q)

    def new_share(kept: float) -> float:
        after = chosen(kept * q + (1 - kept**2) ** 0.5 * noise)
        new = [(~torch.isin(a, b)).float().mean() for a, b in zip(after, before, strict=True)]
        return float(torch.stack(new).mean())

    low, high = 0.9, 0.99999
    for _ in range(20):
        rho = (low + high) / 2
        low, high = (low, rho) if new_share(rho**FIGURE_6_STEPS) < FIGURE_6_SHARE else (rho, high)
    return (low + high) / 2
