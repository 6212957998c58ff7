"""How a decode step selects its pages: digests, reductions over heads, and the selection, as plain references.

Shapes: W queries of a window, N pages of S tokens, H key-value heads, G query heads of each, D head size.

A digest estimates the attention logits q.k (with queries pre-scaled by 1/sqrt(D)) of a page's tokens, and from them
the page's log mass, log sum exp(q.k):
    keys          the keys themselves: the true page mass, the oracle
    rotated-2     for rotated keys, the mean in int8, and each token's difference from it with two bits per channel and
                  a scale: ops/rotated.py, for any page size
    minmax-R      bounds over R consecutive tokens; minmax-S is that of Quest, the paper and ops/minmax.py
    window        the mean key of the best window of a page, stride half a page, from halves of 16 tokens: SparDA;
                  a window that reaches into the next page counts only if that one is full
    pilot         a trained page embedding times one of the queries of a group: RheoServe; both policy/learned
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_scout.ops.rotated import FIRST, SECOND, rotate

KINDS = ("keys", "rotated", "minmax", "window", "pilot")
CHOICES = {
    "reduce": ("mass", "value", "windows"),
    "grain": ("layer", "head"),
    "query": ("real", "predicted", "forecast"),
    "attends": ("real", "predicted-missing", "reweighed-missing"),
}


@dataclass(frozen=True)
class Setting:
    """One way to decode.

    Attributes:
        budget_tokens: in full pages, including the first page and the newest; None: all, full attention.
        digest, reduce: see above and `reduced`.
        grain: "layer": one selection for all heads; "head": one per key-value head.
        query: which query selects: the layer's own, the next layer's projection of this layer's input, or one trained
            vector per key-value head.
        attends: whose query attends to the selected pages, except the first and the newest, which are always on the
            device: the real one; the predicted one for those that no token shortly before had selected ("-missing");
            "reweighed": with their joint log mass corrected by the digest, + est(q) - est(predicted q).
        resident_steps: a page stays on the device for so many tokens after one that selected it.
        reweigh: the share of that correction that is applied.
        cache_tokens: of a device cache whose pages RheoServe's policy moves (residents.py); the real query attends to
            all that it holds, beside the selected ones.
    """

    budget_tokens: int | None = None
    digest: str = "minmax-32"
    reduce: str = "mass"
    grain: str = "layer"
    page_tokens: int = 32
    query: str = "real"
    attends: str = "real"
    resident_steps: int = 1
    reweigh: float = 1.0
    cache_tokens: int = 0

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} = {value!r}: choose one of {', '.join(choices)}")
        if self.attends != "real" and self.query in ("real", "forecast"):
            raise ValueError(f"attends = {self.attends!r} needs a predicted query")
        if self.cache_tokens and self.attends != "real":
            raise ValueError("cache_tokens: all pages need the real query")
        if self.budget_tokens is not None and self.budget_tokens < 2 * self.page_tokens:
            raise ValueError(f"budget_tokens = {self.budget_tokens}: less than two pages")

    @property
    def name(self) -> str:
        """One-line description of the differences from plain selection by the real query."""
        if self.budget_tokens is None:
            return "full"
        more = {k: v for k, v in asdict(self).items() if v != getattr(Setting, k)}
        said = [f"{k}={v}" for k, v in more.items() if k not in ("budget_tokens", "digest")]
        return " ".join([self.digest, str(self.budget_tokens), *said])

    def fields(self) -> dict[str, Any]:
        return asdict(self)


def in_two_bits(x: Tensor) -> Tensor:
    """[..., D] quantized to two bits per channel with one scale per vector."""
    scale = x.square().mean(-1, keepdim=True).sqrt()
    first = torch.where(x < 0, -scale, scale)
    return FIRST * first + SECOND * torch.where(x.abs() > FIRST * scale, first, -first)


def in_int8(x: Tensor) -> Tensor:
    """[..., D] quantized to int8 with one scale per vector."""
    step = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo().tiny)
    return (x / step).round() * step


class Digest:
    """Digests of pages, and the scores of queries by them.

    Args:
        name: see the module docstring.
        pages: [H, N, S, D], of the text.
        trained: of the layer, for pilot: w_k [H, r, 2 D] and w_q [H, r, G * D].
    Raises:
        ValueError: an unknown name.
    """

    def __init__(self, name: str, pages: Tensor, trained: tuple[Tensor, ...] = ()) -> None:
        self.kind, _, rest = name.partition("-")
        if self.kind not in KINDS:
            raise ValueError(f"digest {name!r} is not known")
        if name == "pilot" and not trained:
            script = "scripts/train_forecast.py --kind pilot"
            raise ValueError(f"digest {name!r} needs a file: {script}")
        self._trained = trained
        self._rows = int(rest or 1)  # tokens of a row of bounds
        self._text = self._summary(pages)

    def _summary(self, pages: Tensor) -> tuple[Tensor, ...]:
        """For ``pages`` [H, N, S, D]: bounds of R rows of S / R tokens each, or a row per token; [H, N, R, D]."""
        kind = self.kind
        if kind == "keys":
            return (pages,)
        if kind == "minmax":
            boxes = pages.unflatten(2, (-1, self._rows))
            return boxes.amax(3), boxes.amin(3)
        if kind == "window":
            return (pages.unflatten(2, (2, -1)).mean(3),)
        if kind == "pilot":
            from sglang_scout.policy.learned import pooled

            of_pages = pooled(pages.permute(1, 2, 0, 3))
            return (torch.einsum("hrx,nhx->hnr", self._trained[0], of_pages),)
        x = rotate(pages)
        mean = in_int8(x.mean(2, keepdim=True))
        return (mean + in_two_bits(x - mean),)

    def log_norms(self, values: Tensor) -> Tensor:
        """[H, N, S] for ``values`` [H, N, S, D], as stored by this digest: rotated ones in a byte."""
        norms = values.norm(dim=-1)
        if self.kind == "rotated":
            step = (norms.amax(-1, keepdim=True) / 255).clamp(min=torch.finfo().tiny)
            norms = (norms / step).round() * step
        return norms.log()

    def windows(self, q: Tensor, pages: int, more: Tensor, full: Tensor) -> Tensor:
        """[H, M, N, 2] logits of the two windows that begin in each page, of the kind "window"; -inf where a window has
        tokens beyond a query's full pages. Arguments as of `scores`."""
        halves = torch.cat([self._text[0][:, :pages], *self._summary(more)], 1)
        first, second = torch.einsum("hmd,hnwd->hmnw", q, halves).unbind(-1)
        following = torch.nn.functional.pad(first, (0, 1))[..., 1:]
        found = torch.stack([first + second, second + following], -1) / 2
        last = torch.arange(first.shape[-1])[:, None] + torch.arange(2)  # page of a window
        return found.masked_fill(last >= full[:, None, None], -torch.inf)

    def scores(
        self, q: Tensor, pages: int, more: Tensor, full: Tensor, tokens: Tensor | None = None
    ) -> Tensor:
        """[H, M, N] for scaled queries ``q`` [H, M, D]: N are the first ``pages`` of the text, then ``more`` pages.

        Args:
            full: [M] each query's number of full pages.
            tokens: [H, N, S], the log weight of each token, for digests with per-token estimates.
        """
        if self.kind == "window":
            return self.windows(q, pages, more, full).amax(-1)
        text = tuple(x[:, :pages] for x in self._text)
        if self.kind == "pilot":
            H, M, D = q.shape
            embeddings = torch.cat([text[0], *self._summary(more)], 1)
            group = self._trained[1].shape[-1] // D
            of_query = torch.einsum("hrx,hwx->hwr", self._trained[1], q.reshape(H, -1, group * D))
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
        return u.sub_(largest).exp_().sum(-1).log_().add_(largest[..., 0])


def reduced(how: str, u: Tensor, heads: tuple[int, ...], finer: Tensor | None = None) -> Tensor:
    """Reduces scores over the dimensions ``heads`` of u [..., N] to one per page; void pages are -inf.

    mass: sum of the heads' softmax over pages.
    value: the same with each token weighted by its value norm; ``finer`` is u so weighted (as in ops/rotated.py).
    windows: sum of the heads' softmax over windows, of which a page has its largest; ``finer`` [..., N, 2] are theirs
        (InfLLM-V2, the sparse attention that SparDA replaces: arXiv 2606.04511, section 4.3).
    """
    if how == "value":
        assert finer is not None
        return (finer - u.logsumexp(-1, keepdim=True)).exp().sum(heads)
    if how == "windows":
        assert finer is not None
        summed = finer.flatten(-2).softmax(-1).sum(heads)
        return summed.unflatten(-1, finer.shape[-2:]).amax(-1)
    return u.softmax(-1).sum(heads)


def page_scores(setting: Setting, u: Tensor, full: Tensor, finer: Tensor | None = None) -> Tensor:
    """[H or 1, W, N] scores of pages from ``u`` [H, W, G, N] and each query's number of full pages [W]; ``finer``: see
    `reduced`."""
    page = torch.arange(u.shape[-1])
    offered = page < full[:, None]  # [W, N]
    heads = (0, 2) if setting.grain == "layer" else (2,)
    u = u.masked_fill(~offered[:, None], -torch.inf)
    score = reduced(setting.reduce, u, heads, finer)
    return score.view(-1, *offered.shape).masked_fill(~offered, 0.0)


def choose(setting: Setting, score: Tensor, full: Tensor) -> Tensor:
    """The selected pages as bool [H or 1, W, N], by ``score`` of the same shape."""
    assert setting.budget_tokens is not None
    page = torch.arange(score.shape[-1])
    offered = page < full[:, None]  # [W, N]
    forced = (page == 0) | (page == full[:, None] - 1)
    key = score.masked_fill(~offered, -torch.inf).masked_fill(forced & offered, torch.inf)
    k = min(setting.budget_tokens // setting.page_tokens, len(page))
    found, best = key.topk(k, -1)
    return torch.zeros_like(key, dtype=torch.bool).scatter_(-1, best, found > -torch.inf)
