"""Teacher-forced decode of a window of tokens after a prefilled text, as a server with this selection would decode it.

Given the layer inputs, a token's keys depend on that token alone, so all tokens of a window go through a layer as a
batch; each selects its own pages among those that are full before it. Keys and values of the text come from full
attention (the prefill server), those of the window from hidden states computed with the selection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmark.accuracy.study.model import KV, Model
from benchmark.accuracy.study.residents import Residents
from benchmark.accuracy.study.selection import Digest, Setting, choose, page_scores

ROWS = 64  # queries per block


class Text:
    """A prefilled text: KV of each layer [H, T, D], the last layer's output [T, d], and digests of one kind."""

    def __init__(self, model: Model, tokens: Tensor) -> None:
        self.tokens, self._model = tokens, model
        self.kv: KV
        self.kv, self.last = model.prefill(tokens)
        self._digests: dict[tuple[str, int], list[Digest]] = {}

    def digests(self, name: str, page_tokens: int) -> list[Digest]:
        """Digests of every layer; those of the previous setting are dropped."""
        if (name, page_tokens) not in self._digests:
            whole = len(self.tokens) // page_tokens
            pages = (k[:, : whole * page_tokens].unflatten(1, (whole, -1)) for k, _ in self.kv)
            made = [Digest(name, x, self._model.file_of(name, i)) for i, x in enumerate(pages)]
            self._digests = {(name, page_tokens): made}
        return self._digests[name, page_tokens]


@dataclass
class Window:
    """Results of a window of W tokens.

    Attributes:
        log_probs: [W, V], of the token after each.
        mass: [L] share of the real query's attention mass that was attended to, mean over heads and the tokens that
            were not prefilled.
        resident_mass: [L] the same of the pages in the device cache and the partially filled one; 0 without a cache.
        cpu: [L] share of the selected pages that the predicted query attended to: the CPU compute ratio.
        chosen: per layer bool [H or 1, W, N], pages attended to, if requested; empty with full attention.
        changes: [L, 5] sums over query heads and tokens with missing pages, weighted by these pages' attention mass, of
            1, |change|, |change - estimate|, change x estimate and estimate^2: the change of their log mass from the
            predicted query to the real one, and the estimate of it that is applied.
    """

    log_probs: Tensor
    mass: Tensor
    resident_mass: Tensor
    cpu: Tensor
    changes: Tensor
    chosen: list[Tensor] = field(default_factory=list)


def decode_window(
    model: Model,
    text: Text,
    start: int,
    tokens: Tensor,
    setting: Setting,
    prefilled: int = 0,
    keep_chosen: bool = False,
) -> Window:
    """Decode ``tokens`` [W] at positions from ``start`` on, after the first ``start`` tokens of ``text``.

    Args:
        prefilled: number of leading tokens that belong to the prompt: they attend to everything.
        keep_chosen: store which pages were attended to.
    Raises:
        ValueError: ``start`` lies within a page.
    """
    if start % setting.page_tokens:
        raise ValueError(f"start = {start}: expected a multiple of {setting.page_tokens}")
    position = torch.arange(start, start + len(tokens))
    layers, group = model.config.layers, model.config.q_heads // model.config.kv_heads
    digests: list[Digest | None] = [None] * layers
    if setting.budget_tokens is not None:
        digests = [*text.digests(setting.digest, setting.page_tokens)]
    x, before = model.embed(tokens), None
    window = Window(torch.empty(0), *torch.zeros(3, layers), torch.zeros(layers, 5))
    for layer, (text_k, text_v) in enumerate(text.kv):
        q = model.query(layer, x, position)
        k, v = model.keys_values(layer, x, position)
        keys, values = (torch.cat([a[:, :start], b], 1) for a, b in ((text_k, k), (text_v, v)))
        predicted = q if before is None else model.query(layer, before, position)
        if setting.query == "forecast":
            predicted = model.forecast(layer, x if before is None else before, position)
        ahead = q if setting.query == "real" else predicted
        sizes = group, start, prefilled
        attention = Attention(setting, digests[layer], keys, values, *sizes)
        if setting.cache_tokens:
            pages = (keys.shape[1], setting.cache_tokens, setting.budget_tokens or 0)
            counts = (n // setting.page_tokens for n in pages)
            attention.residents = Residents(layer, setting.page_tokens, *counts)
        out, chosen = attention(q * model.scale, ahead * model.scale)
        shares = attention.mass, attention.resident_mass, attention.cpu
        window.mass[layer], window.resident_mass[layer], window.cpu[layer] = shares
        window.changes[layer] = attention.changes
        if keep_chosen:
            window.chosen.append(chosen)
        before, x = x, model.after_attention(layer, x, out)
    window.log_probs = model.log_probs(x)
    return window


@dataclass
class Attention:
    """One layer's attention of the tokens from position ``start`` on.

    Attributes:
        digest: None attends to everything.
        keys, values: [H, T, D] from position 0 on.
        group: query heads of each of H.
        prefilled: number of leading tokens that attend to everything.
        residents: the layer's device cache.
        mass, resident_mass, cpu, changes: of one call; see `Window`.
    """

    setting: Setting
    digest: Digest | None
    keys: Tensor
    values: Tensor
    group: int
    start: int
    prefilled: int
    residents: Residents | None = None
    mass: float = 0.0
    resident_mass: float = 0.0
    cpu: float = 0.0
    changes: Tensor = field(default_factory=lambda: torch.zeros(5))

    @property
    def full_tokens(self) -> int:
        """Those in full pages."""
        size = self.setting.page_tokens
        return self.keys.shape[1] // size * size

    def __call__(self, q: Tensor, ahead: Tensor) -> tuple[Tensor, Tensor]:
        """Attention by blocks of tokens.

        Args:
            q, ahead: [W, HQ, D], scaled: the real query, and the one that selects.
        Returns:
            out [W, HQ, D], and the pages attended to, bool [H or 1, W, N].
        """
        (W, HQ, _), (H, T, _) = q.shape, self.keys.shape
        S = self.setting.page_tokens
        out, kept = torch.empty_like(q), []
        mass, resident_mass, on_cpu = 0.0, 0.0, 0
        previous: Tensor | None = None  # selections of ``resident_steps`` tokens before a block
        for rows in torch.arange(W).split(ROWS):
            at = self.start + rows
            of_prompt = (at < self.start + self.prefilled)[:, None]
            real = _grouped(q[rows], H)  # [H, w * G, D]
            logits = (real @ self.keys.mT).view(H, -1, self.group, T)
            later = torch.arange(self.start, T) > at[:, None]  # [w, W]
            logits[..., self.start :].masked_fill_(later[:, None], -torch.inf)
            weights = logits.softmax(-1)
            if self.digest is None:
                caught = weights.sum(-1, keepdim=True)
            else:
                chooser = _grouped(ahead[rows], H)
                chosen, estimate = self._choose(chooser, at // S)
                counts = self._counted(chosen, at) | of_prompt[:, None]
                if self.residents is not None:
                    decoded = ~of_prompt[:, 0]
                    held = torch.zeros(chosen.shape[1:], dtype=torch.bool)
                    held[decoded] = self.residents.follow(chosen[:, decoded], at[decoded])
                    here = self._counted(held[None], at) & ~of_prompt[:, None]
                    resident_mass += float((weights * here).sum())
                    counts |= here
                    chosen = chosen | held
                caught = weights.mul_(counts).sum(-1, keepdim=True)
                kept.append(chosen)
                if self.setting.attends == "real":
                    weights /= caught
                else:
                    steps = self.setting.resident_steps
                    if previous is None:
                        previous = chosen[:, :1].expand(-1, steps, -1)
                    known = torch.cat([previous, chosen], 1)
                    remote = _remote(known, at // S) & ~of_prompt
                    previous = known[:, -steps:]
                    on_cpu += int(remote.sum())
                    self._replace(logits, real, chooser, estimate, remote, at // S)
                    weights = logits.masked_fill_(~counts, -torch.inf).softmax(-1)
            mass += float((caught * ~of_prompt[:, None]).sum())
            part = weights.flatten(1, 2) @ self.values
            out[rows] = part.unflatten(1, (-1, self.group)).transpose(0, 1).flatten(1, 2)
        chosen = torch.cat(kept, 1) if kept else torch.empty(0, 0)
        of_all = max(1, (W - self.prefilled) * HQ)
        self.mass, self.resident_mass = mass / of_all, resident_mass / of_all
        self.cpu = on_cpu / max(1, int(chosen[:, self.prefilled :].sum()))
        return out, chosen

    def _scored(self, q: Tensor, full: Tensor) -> tuple[Tensor, int, Tensor, Tensor]:
        """Arguments of a digest's scores by queries [H, w * G, D] of tokens with so many full pages [w]."""
        size = self.setting.page_tokens
        of_window = self.keys[:, self.start : self.full_tokens]
        new = of_window.unflatten(1, (of_window.shape[1] // size, size))
        return q, self.start // size, new, full.repeat_interleave(self.group)

    def _scores(self, q: Tensor, full: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Of pages: [H, w, G, N]; ``tokens``: see Digest.scores."""
        assert self.digest is not None
        found = self.digest.scores(*self._scored(q, full), tokens)
        return found.unflatten(1, (-1, self.group))

    def _choose(self, chooser: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        """The selection [H or 1, w, N] of tokens with so many full pages [w], and the scores [H, w, G, N]."""
        assert self.digest is not None
        estimate, finer = self._scores(chooser, full), None
        if self.setting.reduce == "value":
            pages = self.values[:, : self.full_tokens]
            norms = self.digest.log_norms(pages.unflatten(1, (-1, self.setting.page_tokens)))
            finer = self._scores(chooser, full, norms)
        elif self.setting.reduce == "windows":
            found = self.digest.windows(*self._scored(chooser, full))
            finer = found.unflatten(1, (-1, self.group))
        score = page_scores(self.setting, estimate, full, finer)
        return choose(self.setting, score, full), estimate

    def _counted(self, chosen: Tensor, at: Tensor) -> Tensor:
        """[H or 1, w, 1, T] tokens of selected pages, and of the partially filled one at positions ``at`` [w]."""
        S, T = self.setting.page_tokens, self.keys.shape[1]
        in_full = torch.arange(T) < (at // S * S)[:, None]
        counts = torch.ones(len(chosen), *in_full.shape, dtype=torch.bool)
        counts[..., : self.full_tokens] = chosen.repeat_interleave(S, -1)
        return (counts | ~in_full)[:, :, None]

    def _replace(
        self,
        logits: Tensor,
        real: Tensor,
        chooser: Tensor,
        estimate: Tensor,
        remote: Tensor,
        full: Tensor,
    ) -> None:
        """The logits of the pages ``remote`` become those of the query that selects."""
        theirs = (chooser @ self.keys[:, : self.full_tokens].mT).unflatten(1, (-1, self.group))
        change = torch.zeros(1, 1, 1, 1)
        if self.setting.attends.startswith("reweighed"):
            exact, expected = (
                u.masked_fill(~remote[:, :, None], -torch.inf).logsumexp(-1, keepdim=True)
                for u in (self._scores(real, full), estimate)
            )
            change = self.setting.reweigh * (exact - expected).nan_to_num(nan=0.0)
        far = remote.repeat_interleave(self.setting.page_tokens, -1)[:, :, None]
        of_full = logits[..., : self.full_tokens]
        ours, other = (x.masked_fill(~far, -torch.inf).logsumexp(-1) for x in (of_full, theirs))
        weight = (ours - logits.logsumexp(-1)).exp()  # 0 without missing pages
        true, found = (ours - other).nan_to_num(nan=0.0), change[..., 0]
        terms = torch.ones_like(true), true.abs(), (true - found).abs(), true * found, found**2
        self.changes += torch.stack([(weight * x).sum() for x in terms])
        of_full.copy_(torch.where(far, theirs + change, of_full))


def _remote(chosen: Tensor, full: Tensor) -> Tensor:
    """Those of the selected pages that the predicted query attends to: which none of the previous tokens had selected,
    without the first and the newest.

    Args:
        chosen: [H or 1, p + w, N] of w tokens and the p before them.
        full: [w] full pages of each.
    Returns:
        [H or 1, w, N].
    """
    w, p = len(full), chosen.shape[1] - len(full)
    remote = chosen[:, -w:].clone()
    remote[..., 0] = False
    newest = (full - 1).clamp(min=0).expand(len(chosen), -1)[..., None]
    remote.scatter_(-1, newest, False)
    for first in range(p):
        remote &= ~chosen[:, first : first + w]
    return remote


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """[w, HQ, D] -> [H, w * G, D]."""
    return q.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
