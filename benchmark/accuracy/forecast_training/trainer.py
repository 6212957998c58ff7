"""Trains the weights that select pages: features of a text, initial weights and steps.

Shapes as in loss.py; C hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmark.accuracy.forecast_training.loss import (
    PAGE_TOKENS,
    caught,
    mean_scores,
    offered_pages,
    page_targets,
    pilot_scores,
    restricted_kl,
)
from benchmark.accuracy.study.model import Model
from benchmark.progress import Progress
from sglang_scout.core.forecast import MIN_RANK, VERSION, Header, PageWeights, save_weights
from sglang_scout.core.profile import ModelIdentity

QUERIES = 256  # per text, at random positions
LARGEST_RATIO = 10.0  # of two layers' norm weights, some of which are nearly 0


@dataclass(frozen=True)
class Plan:
    """A training run; together with the texts it determines every loss."""

    kind: str
    steps: int
    tokens: int
    texts: int
    lr: float
    rank: int
    top_pages: int
    seed: int


@dataclass(frozen=True)
class Sample:
    """Training data from one text.

    Attributes:
        position: [Q] of its queries.
        features: inputs of the selection: for a forecast the normed input [L, Q, C] of the previous layer (layer 0: its
            own), for a pilot the real queries [L, H, Q, G * D].
        pages: embeddings: means of halves [L, N, H, 2, D], or pooled [L, N, H, 2 D].
        targets: [L, H, Q, N].
        offered: [Q, N] bool.
    """

    position: Tensor
    features: Tensor
    pages: Tensor
    targets: Tensor
    offered: Tensor


def sample(model: Model, tokens: Tensor, kind: str, seed: int) -> Sample:
    """The training data of a text of whole pages."""
    T, H = len(tokens), model.config.kv_heads
    N = T // PAGE_TOKENS
    first = 4 * PAGE_TOKENS  # so that there is a choice
    draw = torch.Generator().manual_seed(seed)
    position = (first + torch.randperm(T - first, generator=draw)[:QUERIES]).sort().values
    features, pages, targets, before = [], [], [], []

    from sglang_scout.policy.learned import half_means, pooled

    def see(layer: int, x: Tensor, q: Tensor, k: Tensor) -> None:
        of_pages = k.unflatten(1, (N, PAGE_TOKENS)).permute(1, 2, 0, 3)
        if kind == "forecast":
            y = model.normed(layer, x[position])
            features.append(before[-1] if before else y)  # the previous layer; layer 0 its own
            before.append(y)
            pages.append(half_means(of_pages))
        else:
            features.append(q[position].unflatten(1, (H, -1)).flatten(2).transpose(0, 1))
            pages.append(pooled(of_pages))
        targets.append(page_targets(q[position], k, position))

    model.prefill(tokens, see)
    stacked = (torch.stack(x) for x in (features, pages, targets))
    return Sample(position, *stacked, offered_pages(position, N))


def first_forecast(model: Model) -> dict[str, Tensor]:
    """Initial W_q of each layer for the normed input of the previous layer, averaged over a KV head's query heads."""
    config, rows = model.config, []
    for layer in range(config.layers):
        w = model.weight(layer, "self_attn.q_proj")
        w = w.unflatten(0, (config.kv_heads, -1, config.head_dim))
        own, source = (model.weight(n, "input_layernorm") for n in (layer, max(layer - 1, 0)))
        ratio = (own / source).nan_to_num(1.0).clamp(-LARGEST_RATIO, LARGEST_RATIO)
        rows.append(w.mean(1).flatten(0, 1) * ratio)
    return {"w": torch.stack(rows)}


def first_pilot(one: Sample, model: Model, rank: int) -> dict[str, Tensor]:
    """Projects queries and mean keys on a KV head's principal query directions; extremes start with weight 0."""
    q = one.features.unflatten(-1, (-1, model.config.head_dim)).flatten(2, 3)  # [L, H, Q * G, D]
    directions = torch.linalg.eigh(q.mT @ q).eigenvectors[..., -rank:].mT  # [L, H, r, D]
    group = model.config.q_heads // model.config.kv_heads
    w_k = torch.cat([directions, torch.zeros_like(directions)], -1)
    return {"w_k": w_k, "w_q": directions.repeat(1, 1, 1, group) / group}


def scores(model: Model, weights: dict[str, Tensor], one: Sample) -> Tensor:
    """[L, H, Q, N] logits (equation 13)."""
    config = model.config
    if "w" in weights:
        y = torch.einsum("lqc,lxc->lqx", one.features, weights["w"])
        y = model.rope(y.unflatten(-1, (config.kv_heads, -1)), one.position).transpose(1, 2)
        found = mean_scores(y, one.pages)
    else:
        found = pilot_scores(weights["w_q"], one.features, weights["w_k"], one.pages)
    return found * model.scale


class Trainer:
    """Weights, optimizer and the step; every step is a function of them, the plan and the texts.

    Args:
        text: tokens of text 0, 1, ...; the one after the last of the plan is held out.
    """

    def __init__(
        self, model: Model, identity: ModelIdentity, plan: Plan, text: Callable[[int], Tensor]
    ) -> None:
        self.model, self.identity, self.plan, self._text = model, identity, plan, text
        least, most = MIN_RANK, model.config.head_dim
        if plan.kind == "pilot" and not least <= plan.rank <= most:
            expected = f"expected one from {least} to the head size, {most}"
            raise ValueError(f"a rank of {plan.rank}: {expected}")
        self._samples: dict[int, Sample] = {}
        self.step = 0
        if plan.kind == "forecast":
            first = first_forecast(model)
        else:
            first = first_pilot(self.sample(0), model, plan.rank)
        self.weights = {name: x.contiguous().requires_grad_() for name, x in first.items()}
        self.optimizer = torch.optim.Adam(self.weights.values(), lr=plan.lr)

    def sample(self, index: int) -> Sample:
        if index not in self._samples:
            seed = self.plan.seed * 1_000_003 + index
            self._samples[index] = sample(self.model, self._text(index), self.plan.kind, seed)
        return self._samples[index]

    def train_step(self) -> float:
        """Trains on one text; returns the loss, summed over layers, mean over queries and heads."""
        epoch, place = divmod(self.step, self.plan.texts)
        draw = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + epoch)
        one = self.sample(int(torch.randperm(self.plan.texts, generator=draw)[place]))
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr * (1 - self.step / self.plan.steps)
        found = scores(self.model, self.weights, one)
        kl = restricted_kl(one.targets, found, one.offered, self.plan.top_pages)
        loss = kl.mean((1, 2)).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> str:
        """The loss and the quality of selection on the held-out text."""
        one = self.sample(self.plan.texts)
        found = scores(self.model, self.weights, one)
        arguments = one.targets, found, one.offered, self.plan.top_pages
        kl, share = restricted_kl(*arguments).mean((1, 2)).sum(), caught(*arguments).mean()
        return f"held out: loss {kl:.2f}, its {self.plan.top_pages} pages have {share:.1%} of what the best have"

    def result(self) -> PageWeights:
        made_by = f"scripts/train_forecast.py {json.dumps(asdict(self.plan))}"
        header = Header(VERSION, self.plan.kind, self.identity, made_by)
        return PageWeights(header, {name: x.detach().numpy() for name, x in self.weights.items()})


def train(trainer: Trainer, out: Path) -> None:
    """Trains until the plan is done, then writes ``out``."""
    progress, plan = Progress(), trainer.plan
    progress.say(trainer.evaluate())
    while trainer.step < plan.steps:
        loss = trainer.train_step()
        progress.update(f"step {trainer.step} of {plan.steps}, loss {loss:.2f}")
    progress.say(trainer.evaluate())
    save_weights(trainer.result(), str(out))
