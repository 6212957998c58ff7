"""How a decode step chooses its pages: digests, reductions over heads, and the choice itself, as plain references.

Shapes: W queries of a window, N pages of S tokens, H key-value heads, G query heads of each, D head size.

A digest estimates the attention logits q.k (scaled by 1/sqrt(D), as the queries here are) of a page's tokens, and from
them the page's log mass, log sum exp(q.k):
    keys          the keys themselves: the true page mass, the oracle
    mean-R        means of R consecutive tokens; mean-S is the page's mean key
    rotated-B     of rotated keys the mean in int8, and what each token differs from it by, in B = 1 or 2 bits a channel
                  and a scale: ops/rotated.py, for any page size
    pca-C         the C leading principal components of all keys in four bits (calibrated on the text)
    minmax-R      bounds over R consecutive tokens; minmax-S is Quest's, the paper's and ops/score.py's
    window        the mean key of the best window of a page, halves of 16 tokens and half a page apart: SparDA's
    pilot         a trained embedding of the page, on a trained one of a group's queries: RheoServe's; both ops/embed.py
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_scout.ops.embed import pooled
from sglang_scout.ops.rotated import FIRST, ONE_BIT, SECOND, rotate

REDUCTIONS = ("mass", "value", "max", "sum")
QUERIES = ("real", "predicted", "extrapolated", "forecast")
ATTENDS = (
    "real",
    "predicted",
    "predicted-missing",
    "corrected",
    "corrected-missing",
    "reweighed",
    "reweighed-missing",
)


@dataclass(frozen=True)
class Setting:
    """One way to decode.

    Attributes:
        budget_tokens: in full pages, the first page and the newest among them; None: all, full attention.
        digest, reduce: see above and `reduced`.
        grain: "layer": one choice for all heads; "head": one for each key-value head.
        query: what chooses: the layer's own query, the next layer's projection of this layer's input, or that of the
            input moved by half of what the token before changed; or one trained vector for each key-value head.
        exact_layers, exact_steps: layers, and first tokens of a window, that choose and attend with the real query.
        dense_layers: that attend to everything.
        stop_mass: where the budget does not cover all pages, choose no more than hold this share of the mass that the
            digest tells.
        attends: whose query attends to the chosen pages, but for the first and the newest, which are always on the
            device: the real one; the predicted one to all of them, or to those that the token before had not chosen
            ("-missing"); "corrected": with the page's log mass corrected by the digest, + est(q) - est(predicted q);
            "reweighed": with that of all of them together corrected so.
        far: of the pages that ``attends`` names so many, drawn for each token.
        kv: the type of torch that keys and values are rounded to for attention; none: "". Digests are not.
    """

    budget_tokens: int | None = None
    digest: str = "minmax-32"
    reduce: str = "mass"
    grain: str = "layer"
    page_tokens: int = 32
    query: str = "real"
    exact_layers: tuple[int, ...] = ()
    exact_steps: int = 0
    dense_layers: tuple[int, ...] = ()
    stop_mass: float = 1.0
    attends: str = "real"
    far: float = 1.0
    kv: str = ""

    def __post_init__(self) -> None:
        for name, choices in (
            ("reduce", REDUCTIONS),
            ("grain", ("layer", "head")),
            ("query", QUERIES),
            ("attends", ATTENDS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: choose one of {', '.join(choices)}"
                )
        if self.attends != "real" and self.query in ("real", "forecast"):
            raise ValueError(f"attends = {self.attends!r} needs a predicted query")
        if self.stop_mass < 1 and self.reduce not in ("mass", "value"):
            raise ValueError(
                f"stop_mass = {self.stop_mass} needs reduce = 'mass' or 'value', not {self.reduce!r}"
            )
        if self.budget_tokens is not None and self.budget_tokens < 2 * self.page_tokens:
            raise ValueError(f"budget_tokens = {self.budget_tokens}: less than two pages")

    @property
    def name(self) -> str:
        """What differs from a plain choice by the real query, in a line."""
        if self.budget_tokens is None:
            return f"full kv={self.kv}" if self.kv else "full"
        more = {k: v for k, v in asdict(self).items() if v != getattr(Setting, k)}
        said = [f"{k}={v}" for k, v in more.items() if k not in ("budget_tokens", "digest")]
        return " ".join([self.digest, str(self.budget_tokens), *said])

    def fields(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def coded(x: Tensor, bits: int) -> Tensor:
    """Each vector's channels as ``bits`` a channel and one scale: what of [..., D] is left, [..., D]."""
    scale = x.square().mean(-1, keepdim=True).sqrt()
    first = torch.where(x < 0, -scale, scale)
    if bits == 1:
        return ONE_BIT * first
    return FIRST * first + SECOND * torch.where(x.abs() > FIRST * scale, first, -first)


def in_int4(x: Tensor) -> Tensor:
    """[..., D] as sixteen levels with one scale for each vector."""
    step = (x.abs().amax(-1, keepdim=True) / 7.5).clamp(min=torch.finfo().tiny)
    return ((x / step - 0.5).round().clamp(-8, 7) + 0.5) * step


def in_int8(x: Tensor) -> Tensor:
    """[..., D] as int8 with one scale for each vector."""
    step = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo().tiny)
    return (x / step).round() * step


class Digest:
    """What a digest keeps of pages, and the scores of queries by it.

    Args:
        name: see the top of this file.
        pages: [H, N, S, D], those of the text; calibrated digests are calibrated on them.
        pilot: w_k [H, r, 2 D] and w_q [H, r, G * D] of the layer.
    Raises:
        ValueError: an unknown name.
    """

    def __init__(self, name: str, pages: Tensor, pilot: tuple[Tensor, ...] = ()) -> None:
        self.kind, _, rest = name.partition("-")
        if self.kind not in ("keys", "mean", "rotated", "pca", "minmax", "window", "pilot"):
            raise ValueError(f"digest {name!r} is not known")
        if self.kind == "pilot" and not pilot:
            raise ValueError(
                "digest 'pilot' needs trained weights: scripts/train_forecast.py --kind pilot"
            )
        self._pilot = pilot
        self._number = int(rest or 1)  # rows' tokens, bits, or components
        if self.kind == "pca":
            self._centre = pages.mean((1, 2), keepdim=True)
            flat = (pages - self._centre).flatten(1, 2)
            self._axes = torch.linalg.eigh(flat.mT @ flat).eigenvectors[..., -self._number :]
        self._text = self._summary(pages)

    def _summary(self, pages: Tensor) -> tuple[Tensor, ...]:
        """Of ``pages`` [H, N, S, D]: bounds, or R rows that stand for the keys of S / R tokens each; [H, N, R, D]."""
        kind, number = self.kind, self._number
        if kind == "keys":
            return (pages,)
        if kind == "minmax":
            boxes = pages.unflatten(2, (-1, number))
            return boxes.amax(3), boxes.amin(3)
        if kind == "mean":
            return (pages.unflatten(2, (-1, number)).mean(3),)
        if kind == "window":
            return (pages.unflatten(2, (2, -1)).mean(3),)
        if kind == "pilot":
            return (
                torch.einsum("hrx,nhx->hnr", self._pilot[0], pooled(pages.permute(1, 2, 0, 3))),
            )
        if kind == "rotated":
            x = rotate(pages)
            mean = in_int8(x.mean(2, keepdim=True))
            return (mean + coded(x - mean, number),)
        parts = in_int4((pages - self._centre).flatten(1, 2) @ self._axes) @ self._axes.mT
        return (self._centre + parts.view(pages.shape),)

    def log_norms(self, values: Tensor) -> Tensor:
        """[H, N, S], of ``values`` [H, N, S, D] as this digest keeps their norms: rotated ones in a byte."""
        norms = values.norm(dim=-1)
        if self.kind == "rotated":
            step = (norms.amax(-1, keepdim=True) / 255).clamp(min=torch.finfo().tiny)
            norms = (norms / step).round() * step
        return norms.log()

    def scores(self, q: Tensor, pages: int, more: Tensor, tokens: Tensor | None = None) -> Tensor:
        """[H, M, N] for scaled queries ``q`` [H, M, D]: N are the first ``pages`` of the text, then ``more`` pages.

        ``tokens`` [H, N, S]: the log of what each token counts, for digests that tell tokens apart.
        """
        text = tuple(x[:, :pages] for x in self._text)
        if self.kind == "window":
            halves = torch.cat([text[0], *self._summary(more)], 1)
            first, second = torch.einsum("hmd,hnwd->hmnw", q, halves).unbind(-1)
            following = torch.nn.functional.pad(first, (0, 1), value=-torch.inf)[..., 1:]
            return (second + torch.maximum(first, following)) / 2
        if self.kind == "pilot":
            H, M, D = q.shape
            embeddings = torch.cat([text[0], *self._summary(more)], 1)
            group = self._pilot[1].shape[-1] // D
            of_query = torch.einsum("hrx,hwx->hwr", self._pilot[1], q.reshape(H, -1, group * D))
            return (of_query @ embeddings.mT).repeat_interleave(group, 1)
        counts = (None, None) if tokens is None else (tokens[:, :pages], tokens[:, pages:])
        parts = zip((text, self._summary(more)), counts, strict=True)
        return torch.cat([self._score(q, *part) for part in parts], -1)

    def _score(self, q: Tensor, summary: tuple[Tensor, ...], tokens: Tensor | None) -> Tensor:
        H, N, R, _ = summary[0].shape
        q = rotate(q) if self.kind == "rotated" else q
        flat = [x.flatten(1, 2).mT for x in summary]
        if self.kind == "minmax":
            u = torch.baddbmm(q.clamp(max=0) @ flat[1], q.clamp(min=0), flat[0])
        else:
            u = q @ flat[0]
        u = u.view(H, q.shape[1], N, R)
        if self.kind == "minmax":
            return u.amax(-1)
        if tokens is not None:
            u += tokens[:, None]
        largest = u.amax(-1, keepdim=True)
        tokens = self._number if self.kind == "mean" else 1
        return (u.sub_(largest).exp_().sum(-1) * tokens).log_().add_(largest[..., 0])


def reduced(how: str, u: Tensor, heads: tuple[int, ...], of_values: Tensor | None = None) -> Tensor:
    """One score for each page from those of the heads, the dimensions ``heads`` of u [..., N]; void pages are -inf.

    mass: sum of the heads' softmax over pages; value: that with each token times the norm of its value, ``of_values``
    as u (as in ops/rotated.py); max: largest log of the softmax (as in ops/score.py); sum: of the scores.
    """
    if how == "value":
        assert of_values is not None
        return (of_values - u.logsumexp(-1, keepdim=True)).exp().sum(heads)
    if how == "mass":
        return u.softmax(-1).sum(heads)
    if how == "max":
        return (u - u.logsumexp(-1, keepdim=True)).amax(heads)
    return u.sum(heads)


def choose(setting: Setting, u: Tensor, full: Tensor, of_values: Tensor | None = None) -> Tensor:
    """The chosen pages as bool [H or 1, W, N], from ``u`` [H, W, G, N] and each query's count of full pages [W].

    ``of_values``: as ``u``, with each token times the norm of its value; for "value".
    """
    assert setting.budget_tokens is not None
    page = torch.arange(u.shape[-1])
    offered = page < full[:, None]  # [W, N]
    heads = (0, 2) if setting.grain == "layer" else (2,)
    u = u.masked_fill(~offered[:, None], -torch.inf)
    score = reduced(setting.reduce, u, heads, of_values)
    score = score.view(-1, *offered.shape).masked_fill(~offered, 0.0)
    forced = (page == 0) | (page == full[:, None] - 1)
    key = score.masked_fill(~offered, -torch.inf).masked_fill(forced & offered, torch.inf)
    k = min(setting.budget_tokens // setting.page_tokens, len(page))
    found, best = key.topk(k, -1)
    kept = found > -torch.inf
    if setting.stop_mass < 1:
        held = score.gather(-1, best)
        before = held.cumsum(-1) - held
        wanted = (before < setting.stop_mass * score.sum(-1, keepdim=True)) | (found == torch.inf)
        kept &= wanted | (full[:, None] <= k)
    return torch.zeros_like(key, dtype=torch.bool).scatter_(-1, best, kept)
