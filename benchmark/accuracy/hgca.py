"""HGCA's Table 1 and Figure 4 (Deng et al.) on real texts: what a window and the older tokens that heads keep lose.

    python -m benchmark.accuracy.hgca --json docs/results/hgca.jsonl

The first tokens of a text are a prompt with full attention; the whole rest is decoded, teacher-forced, by Algorithms 1
and 2: a token attends to the window, and to those older tokens that its KV head kept. Given a layer's inputs, all
tokens go through it as a batch, except for the moving averages. Choices that the paper leaves open:

    the smoothing factor is 0.1; an entry's average starts at its first weight
    query heads share a KV head's list: the largest weight among them counts
    tokens that have left the window by the end of the prompt are kept by the mean weight from the prompt's last block
        of queries, among such tokens; averages start there too
    averages are not delayed as they are on servers, and lists have no limit

A row is a setting on a text: gpu_ratio (window / prompt), beta; nats, full_nats (mean over the decoded tokens); kept
([layer][KV head], share of the tokens outside the window that are kept at the end). The row of full attention (1, 0)
has needed instead: [layer][query head], share of the tokens that hold 0.99 of the last token's attention. Rerunning
the command resumes where it stopped.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmark.accuracy.planted import SOURCES
from benchmark.accuracy.study.model import KV, Model
from benchmark.accuracy.study.run import SMOLLM2
from benchmark.progress import Progress
from benchmark.rows import Row, RowFile, argument_parser, environment, markdown_table

BLOCK = 32
ALPHA = 0.1
BETAS = (0.25, 0.5, 0.75, 1.0)
RATIOS = (0.25, 0.5, 0.75)
TOKENS, PROMPT = 2048, 1536


def first_of(position: Tensor, window: int) -> Tensor:
    """First token of the window of ``window`` tokens; whole blocks leave it."""
    return BLOCK * (position // BLOCK - window // BLOCK + 1).clamp(min=0)


def attended(logits: Tensor, start: int, window: int, beta: float) -> tuple[Tensor, Tensor]:
    """The tokens that a layer's queries attend to.

    Args:
        logits: [H, G, R, T], of the queries from position ``start - BLOCK`` on.
    Returns:
        visible bool [H, R - BLOCK, T] of those from ``start`` on; kept bool [H, T], where tokens in the last query's
        window are False.
    """
    R, T = logits.shape[2:]
    position, here = start - BLOCK + torch.arange(R), torch.arange(T)
    begin = first_of(position, window)
    near = (here >= begin[:, None]) & (here <= position[:, None])
    weight = logits.masked_fill(~near, -torch.inf).softmax(-1).amax(1)  # [H, R, T], A_gpu
    older = here < begin[BLOCK]
    of_prompt = logits[:, :, :BLOCK].masked_fill(~older, -torch.inf).softmax(-1)
    kept = older & (of_prompt.mean(2).amax(1) > beta / int(begin[BLOCK]))
    average = weight[:, 0]
    for row in range(1, R):
        left = slice(int(begin[row - 1]), int(begin[row]))
        if row > BLOCK:  # Algorithm 1, line 24
            kept[:, left] = average[:, left] > beta / window
        average = (1 - ALPHA) * average + ALPHA * weight[:, row]  # line 9
        new = start - BLOCK + row
        average[:, new] = weight[:, row, new]
    visible = near | (kept[:, None] & (here < begin[:, None]))
    return visible[:, BLOCK:], kept


class Decode:
    """Of the tokens from ``start`` on; ``kv`` of the text, ``last_q``: per layer the prompt's last queries."""

    def __init__(self, model: Model, tokens: Tensor, start: int) -> None:
        self.model, self.tokens, self.start = model, tokens, start
        self.last_q: list[Tensor] = []
        self.needed: list[list[float]] = []
        self.kv: KV
        self.kv, last = model.prefill(tokens, self._see)
        self.full_nats = self._nats(last[start:])

    def _see(self, layer: int, x: Tensor, q: Tensor, k: Tensor) -> None:
        self.last_q.append(q[self.start - BLOCK : self.start])
        weight = self._logits(q[-1:], k).softmax(-1).flatten(0, 2)
        held = weight.sort(-1, descending=True).values.cumsum(-1)
        share = ((held < 0.99).sum(-1) + 1) / weight.shape[-1]
        self.needed.append([round(x, 4) for x in share.tolist()])

    def _logits(self, q: Tensor, k: Tensor) -> Tensor:
        """[H, G, R, T] of q [R, HQ, D] and k [H, T, D]."""
        grouped = q.transpose(0, 1).unflatten(0, (len(k), -1))
        return grouped @ k.mT[:, None] * self.model.scale

    def _nats(self, x: Tensor) -> float:
        log_probs = self.model.log_probs(x[:-1])
        return -float(log_probs.gather(1, self.tokens[self.start + 1 :, None]).mean())

    def sparse(self, window: int, beta: float) -> tuple[float, list[list[float]]]:
        """Mean nats, and the kept share by layer and KV head."""
        model, start, shares = self.model, self.start, []
        position = torch.arange(start, len(self.tokens))
        x = model.embed(self.tokens[start:])
        for layer, of_text in enumerate(self.kv):
            q = model.query(layer, x, position)
            new = model.keys_values(layer, x, position)
            k, v = (torch.cat([a[:, :start], b], 1) for a, b in zip(of_text, new, strict=True))
            logits = self._logits(torch.cat([self.last_q[layer], q]), k)
            visible, kept = attended(logits, start, window, beta)
            weight = logits[:, :, BLOCK:].masked_fill_(~visible[:, None], -torch.inf).softmax(-1)
            out = (weight @ v[:, None]).flatten(0, 1).transpose(0, 1)
            outside = int(first_of(position[-1], window))
            shares.append([round(n / outside, 4) for n in kept.sum(-1).tolist()])
            x = model.after_attention(layer, x, out)
        return self._nats(x), shares


def table_1(rows: Sequence[Row]) -> str:
    """By text, change of perplexity against full attention and kept share: mean, minimum and maximum over heads."""
    lines = []
    for source, ratio in itertools.product(SOURCES, RATIOS):
        cells = [source, f"{ratio:g}"]
        for row in sorted(rows, key=operator.itemgetter("beta")):
            if (row["source"], row["gpu_ratio"]) == (source, ratio):
                lost = math.expm1(row["nats"] - row["full_nats"])
                kept = [x for heads in row["kept"] for x in heads]
                share = f"{sum(kept) / len(kept):.0%} ({min(kept):.1%} to {max(kept):.0%})"
                cells.append(f"{lost:+.1%} · {share}")
        lines.append(cells)
    return markdown_table(["text", "GPU ratio", *(f"β = {beta:g}" for beta in BETAS)], lines)


def figure_4(rows: Sequence[Row], layers: Sequence[int] = (0, 5, 10, 15, 20, 25, 29)) -> str:
    """Share of the tokens that a head needs for 99 % of its attention: minimum, median and maximum over heads."""
    lines = []
    for row in (r for r in rows if r["gpu_ratio"] == 1):
        heads = [sorted(row["needed"][layer]) for layer in layers]
        shown = [f"{x[0]:.0%} · {x[len(x) // 2]:.0%} · {x[-1]:.0%}" for x in heads]
        lines.append([row["source"], *shown])
    return markdown_table(["text", *(f"layer {n}" for n in layers)], lines)


def run(model_path: Path, file: RowFile) -> None:
    from tokenizers import Tokenizer

    from texts import load_text

    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    model, progress = Model(model_path), Progress()
    for source in SOURCES:
        if file.has(source=source, gpu_ratio=1.0):
            continue
        ids = tokenizer.encode(load_text(source), add_special_tokens=False).ids
        text = Decode(model, torch.tensor(ids[:TOKENS]), PROMPT)
        full: Row = {"source": source, "full_nats": text.full_nats}
        for ratio, beta in itertools.product(RATIOS, BETAS):
            nats, kept = text.sparse(int(PROMPT * ratio), beta)
            file.add("hgca", **full, gpu_ratio=ratio, beta=beta, nats=nats, kept=kept)
            progress.say(f"{source}: {ratio}, {beta}: {nats - text.full_nats:+.4f} nats")
        more = {"nats": text.full_nats, "needed": text.needed}
        file.add("hgca", **full, gpu_ratio=1.0, beta=0.0, **more)


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows to FILE")
    parser.add_argument("--model-path", type=Path, default=SMOLLM2, help="folder of the model")
    args = parser.parse_args(argv)
    fields = {"model": args.model_path.name, "tokens": TOKENS, "prompt": PROMPT}
    file = RowFile(args.json, environment("hgca", ("torch",)) | {"untimed": True}, fields)
    with torch.inference_mode():
        run(args.model_path, file)
    print(table_1(file.rows), figure_4(file.rows), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
