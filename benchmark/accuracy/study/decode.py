"""Teacher-forced decode of a window of tokens after a prefilled text, as a server with this selection would decode it.

Given the layer inputs, a token's keys depend on that token alone, so all tokens of a window go through a layer as a
batch; each selects its own pages among those that are full before it. Keys and values of the text come from full
attention (the prefill server), those of the window from hidden states computed with the selection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmark.accuracy.study.model import KV, Model
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
        pages: [L] full pages selected, mean over the selecting heads and the tokens that were not prefilled; 0 with
            full attention.
        cosine: [L] of predicted and real query, mean over heads and tokens; NaN for layer 0, which is not predicted.
        chosen: per layer bool [H or 1, W, N], if requested; empty with full attention.
    """

    log_probs: Tensor
    mass: Tensor
    pages: Tensor
    cosine: Tensor
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
        keep_chosen: store the selection in the result.
    Raises:
        ValueError: ``start`` lies within a page.
    """
    if start % setting.page_tokens:
        raise ValueError(f"start = {start}: expected a multiple of {setting.page_tokens}")
    position = torch.arange(start, start + len(tokens))
    layers = model.config.layers
    sparse = setting.budget_tokens is not None
    digests = text.digests(setting.digest, setting.page_tokens) if sparse else []
    x, before = model.embed(tokens), None
    nothing = torch.full((layers,), torch.nan)
    window = Window(torch.empty(0), torch.ones(layers), torch.zeros(layers), nothing)
    for layer, (text_k, text_v) in enumerate(text.kv):
        q = model.query(layer, x, position)
        k, v = model.keys_values(layer, x, position)
        keys, values = (torch.cat([a[:, :start], b], 1) for a, b in ((text_k, k), (text_v, v)))
        predicted = q if before is None else model.query(layer, before, position)
        if setting.query == "forecast":
            predicted = model.forecast(layer, x if before is None else before, position)
        digest = digests[layer] if sparse and layer not in setting.dense_layers else None
        is_real = setting.query == "real" or layer in setting.exact_layers
        ahead = q if is_real else predicted
        scaled = q * model.scale, ahead * model.scale
        out, mass, chosen = attend(setting, digest, *scaled, keys, values, start, prefilled)
        window.mass[layer] = mass
        if digest is not None:
            window.pages[layer] = chosen[:, prefilled:].sum(-1).float().mean()
        if before is not None:
            window.cosine[layer] = torch.cosine_similarity(q, predicted, dim=-1).mean()
        if keep_chosen:
            window.chosen.append(chosen)
        before, x = x, model.after_attention(layer, x, out)
    window.log_probs = model.log_probs(x)
    return window


def attend(
    setting: Setting,
    digest: Digest | None,
    q: Tensor,
    ahead: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    prefilled: int,
) -> tuple[Tensor, float, Tensor]:
    """One layer's attention of the tokens from position ``start`` on.

    Args:
        digest: None attends to everything.
        q, ahead: [W, HQ, D], scaled: the real query, and the one that selects.
        keys, values: [H, T, D] from position 0 on.
        prefilled: number of leading tokens that attend to everything.
    Returns:
        out [W, HQ, D], the share of attention mass covered, and the selection, bool [H or 1, W, N].
    """
    (W, HQ, _), (H, T, _) = q.shape, keys.shape
    G, S = HQ // H, setting.page_tokens
    old, N = start // S, T // S
    new_pages = keys[:, start : N * S].unflatten(1, (N - old, S))
    out, mass, kept = torch.empty_like(q), 0.0, []
    previous: Tensor | None = None  # selection of the token before a block
    for rows in _blocks(W):
        at = torch.arange(start, T)[rows]
        of_prompt = (at < start + prefilled)[:, None]
        real = _grouped(q[rows], H)  # [H, w * G, D]
        logits = (real @ keys.mT).view(H, -1, G, T)
        later = torch.arange(start, T) > at[:, None]  # [w, W]
        logits[..., start:].masked_fill_(later[:, None], -torch.inf)
        if digest is None:
            weights = logits.softmax(-1)
            caught = weights.sum(-1, keepdim=True)
        else:
            full = at // S
            chooser = _grouped(ahead[rows], H)
            estimate = digest.scores(chooser, old, new_pages).view(H, -1, G, N)
            of_values = None
            if setting.reduce == "value":
                norms = digest.log_norms(values[:, : N * S].unflatten(1, (N, S)))
                of_values = digest.scores(chooser, old, new_pages, norms).view(H, -1, G, N)
            score = page_scores(setting, estimate, full, of_values)
            chosen = choose(setting, score, full)  # [H or 1, w, N]
            # The partially filled page always counts, and is not one of the full ones.
            in_full = torch.arange(T) < (full * S)[:, None]
            counts = torch.ones(len(chosen), *in_full.shape, dtype=torch.bool)
            counts[..., : N * S] = chosen.repeat_interleave(S, -1)
            counts = (counts | ~in_full | of_prompt)[:, :, None]  # [H or 1, w, 1, T]
            weights = logits.softmax(-1).mul_(counts)
            caught = weights.sum(-1, keepdim=True)
            kept.append(chosen)
            if setting.attends != "real":
                remote = _remote(setting, chosen, full, previous) & ~of_prompt
                previous = chosen[:, -1:]
                theirs = (chooser @ keys[:, : N * S].mT).view(H, -1, G, N * S)
                if setting.attends.startswith("reweighed"):
                    exact = digest.scores(real, old, new_pages).view(H, -1, G, N)
                    of_remote = [
                        u.masked_fill(~remote[:, :, None], -torch.inf).logsumexp(-1, keepdim=True)
                        for u in (exact, estimate)
                    ]
                    theirs += (of_remote[0] - of_remote[1]).nan_to_num(nan=0.0)
                far = remote.repeat_interleave(S, -1)[:, :, None]
                logits[..., : N * S] = torch.where(far, theirs, logits[..., : N * S])
                weights = logits.masked_fill_(~counts, -torch.inf).softmax(-1)
            else:
                weights /= caught
        mass += float((caught * ~of_prompt[:, None]).sum())
        part = weights.flatten(1, 2) @ values
        out[rows] = part.unflatten(1, (-1, G)).transpose(0, 1).flatten(1, 2)
    return out, mass / max(1, (W - prefilled) * HQ), torch.cat(kept, 1) if kept else torch.empty(0)


def _remote(setting: Setting, chosen: Tensor, full: Tensor, previous: Tensor | None) -> Tensor:
    """Those of the selected pages [H or 1, w, N] that another query attends to."""
    remote = chosen.clone()
    remote[..., 0] = False
    newest = (full - 1).clamp(min=0).expand(len(chosen), -1)[..., None]
    remote.scatter_(-1, newest, False)
    if setting.attends.endswith("missing"):
        first = chosen[:, :1] if previous is None else previous
        remote &= ~torch.cat([first, chosen[:, :-1]], 1)
    return remote


def _blocks(rows: int) -> Iterator[slice]:
    for begin in range(0, rows, ROWS):
        yield slice(begin, min(begin + ROWS, rows))


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """[w, HQ, D] -> [H, w * G, D]."""
    return q.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
