"""HGCA's Table 1 and Figure 4 on a real language model: quality loss with a window and kept tokens per head.

    python -m benchmark.systems.hgca --json docs/results/hgca.jsonl

The first half of a text is prefilled with full attention; the rest is decoded token by token, according to Algorithms
1 and 2 of the paper, with all settings batched. In plain PyTorch, without servers; the algorithms are those of the
tests' float64 oracle (test/policy/hgca_oracle.py), with which test/benchmark/test_hgca_table.py compares them.

A row is a setting on a text: gpu_ratio (window / text), beta, nats and full_nats (mean over the decoded tokens), kept
(a head's kept tokens / tokens that have left the window, mean over layers and heads, at the end). The row of full
attention (1, 0) also has entries_by_layer: the share of the tokens that hold 0.99 of a head's attention at the end,
minimum, median and maximum over heads. Rerunning the command resumes where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmark.accuracy.row_file import RowFile
from benchmark.accuracy.study.model import Model
from benchmark.progress import Progress
from benchmark.rows import environment, markdown_table, read_rows

BLOCK = 32
ALPHA = 0.1  # the policy's value; unspecified in the paper
BETAS = (0.25, 0.5, 0.75, 1.0)
RATIOS = (0.25, 0.5, 0.75)
SOURCES = ("prose", "technical", "code")


class Layer:
    """KV of one layer, and the tokens that R settings keep. beta, window: [R]; k, v: [H, T, D] of the prompt."""

    def __init__(self, k: Tensor, v: Tensor, length: int, beta: Tensor, window: Tensor) -> None:
        rows, (heads, tokens, size) = len(beta), k.shape
        self.k, self.v = (torch.zeros(rows, heads, length, size) for _ in range(2))
        self.k[:, :, :tokens], self.v[:, :, :tokens] = k, v
        self.beta, self.window, self.length = beta[:, None, None], window, tokens
        self.keep = torch.zeros(rows, heads, length, dtype=torch.bool)
        self.average = torch.zeros(rows, heads, length)
        self.before = self.average
        self.first = self._first(tokens + 1)
        self.steps = 0

    def _first(self, length: int) -> Tensor:
        """[R] first token of the window: whole blocks leave it."""
        return BLOCK * ((length - 1) // BLOCK - (self.window // BLOCK - 1)).clamp(min=0)

    def step(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """q [R, HQ, D], k and v [R, H, D] of the new token: [R, HQ, D], and weights [R, H, G, T] of all tokens."""
        n, here = self.length, torch.arange(self.length + 1)
        self.k[:, :, n], self.v[:, :, n] = k, v
        self.length = n = n + 1
        first = self._first(n)
        left = (here >= self.first[:, None]) & (here < first[:, None])  # [R, T]
        salient = self.before[..., :n] > self.beta / self.window[:, None, None]
        self.keep[..., :n] |= left[:, None] & (
            salient if self.steps > 1 else torch.ones(1, dtype=torch.bool)
        )
        self.first = first
        logits = (
            torch.einsum("rhgd,rhtd->rhgt", q.unflatten(1, (k.shape[1], -1)), self.k[:, :, :n])
            * scale
        )
        near = (here >= first[:, None])[:, None]  # [R, 1, T]
        seen = near | self.keep[..., :n] if self.steps else torch.ones_like(self.keep[..., :n])
        weight = logits.masked_fill(~seen[:, :, None], -torch.inf).softmax(-1)
        out = (weight @ self.v[:, :, :n]).flatten(1, 2)
        in_window = logits.masked_fill(~near[:, :, None], -torch.inf).softmax(-1).amax(2)
        if self.steps == 0:
            older = (
                logits.masked_fill(near[:, :, None], -torch.inf).softmax(-1).nan_to_num().amax(2)
            )
            self.keep[..., :n] |= older > self.beta / first[:, None, None].clamp(min=1)
        self.before = self.average.clone()
        old = self.average[..., :n]
        moved = (1 - ALPHA) * old + ALPHA * in_window
        fresh = (here == n - 1) | torch.tensor(self.steps == 0)
        self.average[..., :n] = torch.where(fresh, in_window, moved)
        self.steps += 1
        return out, weight

    def kept(self) -> Tensor:
        """[R] share of the tokens that have left the window that a head keeps."""
        return self.keep.sum(-1).float().mean(1) / self.first.clamp(min=1)


def decode(model: Model, tokens: Tensor, begin: int, beta: Tensor, window: Tensor, say: Progress):
    """Decode ``tokens[begin:]`` with R settings: nats [R], kept share [R], and `entries` of each layer."""
    rows = len(beta)
    kv, _ = model.prefill(tokens[:begin])
    layers = [Layer(k, v, len(tokens), beta, window) for k, v in kv]
    del kv
    nats, shares = torch.zeros(rows), []
    for at in range(begin, len(tokens) - 1):
        position = torch.full((rows,), at)
        x = model.embed(tokens[at].expand(rows))
        for i, layer in enumerate(layers):
            q = model.query(i, x, position)
            k, v = (y.transpose(0, 1) for y in model.keys_values(i, x, position))
            out, weight = layer.step(q, k, v, model.scale)
            if at == len(tokens) - 2:
                shares.append(entries(weight[0].flatten(0, 1)))
            x = model.after_attention(i, x, out)
        nats -= model.log_probs(x)[:, tokens[at + 1]]
        say.update(f"token {at - begin + 1} of {len(tokens) - 1 - begin}")
    kept = torch.stack([layer.kept() for layer in layers]).mean(0)
    return nats / (len(tokens) - 1 - begin), kept, shares


def entries(weight: Tensor) -> list[float]:
    """Share of the tokens that hold 0.99 of the mass of ``weight`` [heads, T]; min, median and max over heads."""
    held = weight.sort(-1, descending=True).values.cumsum(-1)
    share = ((held < 0.99).sum(-1) + 1) / weight.shape[-1]
    return [round(float(f), 4) for f in (share.min(), share.median(), share.max())]


def table(rows: list[dict]) -> str:
    """Change of perplexity against full attention, all texts together."""
    rows = [row for row in rows if row["beta"]]
    lines = []
    for ratio in sorted({row["gpu_ratio"] for row in rows}):
        cells = [f"{ratio:g}"]
        for beta in sorted({row["beta"] for row in rows}):
            mine = [r for r in rows if (r["gpu_ratio"], r["beta"]) == (ratio, beta)]
            lost = sum(r["nats"] - r["full_nats"] for r in mine) / len(mine)
            kept = sum(r["kept"] for r in mine) / len(mine)
            cells.append(f"{torch.tensor(lost).exp() - 1:+.2%} · {kept:.0%}")
        lines.append(cells)
    betas = [f"β = {beta:g}" for beta in sorted({row["beta"] for row in rows})]
    return markdown_table(["GPU ratio", *betas], lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="FILE", help="write one row per line to FILE")
    add("--model", type=Path, help="folder; default: SmolLM2, created if needed")
    add("--tokens", type=int, default=2048, help="tokens per text; the second half is decoded")
    add("--texts", type=int, default=3, choices=range(1, 4))
    args = parser.parse_args(argv)
    from smollm2 import smollm2
    from texts import load_text

    folder = args.model or smollm2()
    model, say = Model(folder), Progress()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fields = {"model": folder.name, "tokens": args.tokens}
    file = RowFile(
        args.json,
        environment("hgca", ["torch"]) | {"untimed": True},
        fields,
        ("source", "gpu_ratio", "beta"),
    )
    settings = [(1.0, 0.0)] + [(ratio, beta) for ratio in RATIOS for beta in BETAS]
    for source in SOURCES[: args.texts]:
        if file.has(source=source, gpu_ratio=1.0, beta=0.0):
            continue
        ids = tokenizer.encode(load_text(source), add_special_tokens=False).ids
        tokens = torch.tensor(ids[: args.tokens])
        window, beta = zip(
            *((int(args.tokens * r) // BLOCK * BLOCK, b) for r, b in settings), strict=True
        )
        say.say(f"{source}: {len(settings)} settings side by side")
        with torch.inference_mode():
            nats, kept, shares = decode(
                model, tokens, args.tokens // 2, torch.tensor(beta), torch.tensor(window), say
            )
        for i in (*range(1, len(settings)), 0):
            ratio, b = settings[i]
            row = {"source": source, "gpu_ratio": ratio, "beta": b}
            row |= {"nats": float(nats[i]), "full_nats": float(nats[0]), "kept": float(kept[i])}
            file.add("hgca", **row, **({} if i else {"entries_by_layer": shares}))
    file.close()
    print(table(read_rows(args.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
