"""What a way to choose pages costs in answers, without servers: the small model in plain PyTorch.

    python benchmark/accuracy/selection_study.py --json docs/results/selection_study.jsonl

Texts are prefilled with full attention. Then the answer is decoded greedily, and in every layer the query attends to
the chosen pages and the page being filled, nothing else. What differs is how pages are chosen:
    minmax-N        bounds of the keys (Quest) in N boxes of consecutive tokens; 1 is what servers have
    mean, gauss     mean of a page's keys; mean plus two standard deviations per channel
    signs           one bit per key element (ops/signs.py)
    exact           the largest product with any key of the page: what no digest can beat by much
and from which query: the real one in all layers ("real"), in layer 1 ("real in 1"; layer 0 always has it), or one layer
ahead ("predicted"). Attention itself is always by the real query. The first page and the newest are always chosen.
Layers named as dense attend to everything.

A row: digest, query, reduce, page_tokens, dense_layers, budget_tokens, length_tokens, right, asked, low, high (95 %),
by_task, and digest_bytes of a page of one KV head, 16-bit values.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
for folder in ("scripts", "benchmark", "benchmark/accuracy"):
    sys.path.insert(0, str(ROOT / folder))

import tasks  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from scoring import wilson_interval  # noqa: E402

from recall_model import RecallModel, RecallSpec, apply_rope, rope_tables  # noqa: E402
from rows import Writer, environment  # noqa: E402
from sglang_scout.cli.progress import Progress  # noqa: E402

MODEL = Path(__file__).resolve().parent / "recall_model"
FIRST_SEED = 70_000
TOKEN_BYTES = 2


@dataclass(frozen=True)
class Variant:
    digest: str = "minmax-1"
    query: str = "real"
    reduce: str = "mass"
    page_tokens: int = 32
    dense_layers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        page = "" if self.page_tokens == 32 else f", pages of {self.page_tokens}"
        dense = f", dense in {', '.join(map(str, self.dense_layers))}" if self.dense_layers else ""
        return f"{self.digest}, {self.query} query, {self.reduce}{page}{dense}"


STUDY = [
    *(Variant(f"minmax-{boxes}") for boxes in (1, 2, 4, 8)),
    Variant(page_tokens=16),
    Variant(reduce="max"),
    Variant(reduce="sum"),
    Variant(reduce="stand-out"),
    Variant("mean"),
    Variant("gauss"),
    Variant("signs", reduce="stand-out"),
    Variant("exact"),
    Variant(query="predicted"),
    Variant(query="real in 1"),
    Variant(dense_layers=(0,)),
    Variant(dense_layers=(0, 1)),
    Variant(query="predicted", dense_layers=(0, 1)),
    Variant("signs", "predicted", "stand-out"),
    Variant("signs", "real in 1", "stand-out"),
]


@dataclass
class Text:
    """A prefilled sample: KV per layer ``[H, T, D]``, and the first token of the answer."""

    sample: tasks.Sample
    first: int
    kv: list[tuple[Tensor, Tensor]]


def load_model(folder: Path) -> RecallModel:
    model = RecallModel(RecallSpec())
    weights = load_file(folder / "model.safetensors")
    missing, unexpected = model.load_state_dict({k: v.float() for k, v in weights.items()}, False)
    if unexpected or [name for name in missing if "lm_head" not in name]:
        raise SystemExit(f"{folder}: not the model that this study knows ({missing}, {unexpected})")
    return model.eval()


def heads_of(layer: torch.nn.Module, x: Tensor, position: Tensor, spec: RecallSpec) -> Tensor:
    """Query [T, HQ, D] of ``layer`` at its input ``x`` [T, d], after q-norm and RoPE."""
    attention = layer.self_attn
    q = attention.q_proj(layer.input_layernorm(x)).view(1, len(x), spec.heads, -1)
    cos, sin = rope_tables(position[None], spec)
    return apply_rope(attention.q_norm(q).transpose(1, 2), cos, sin)[0].transpose(0, 1)


def keys_of(
    layer: torch.nn.Module, x: Tensor, position: Tensor, spec: RecallSpec
) -> tuple[Tensor, Tensor]:
    """K and V [H, T, D] in bfloat16's precision."""
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    k = attention.k_proj(normed).view(1, len(x), spec.kv_heads, -1)
    cos, sin = rope_tables(position[None], spec)
    k = apply_rope(attention.k_norm(k).transpose(1, 2), cos, sin)[0]
    v = attention.v_proj(normed).view(len(x), spec.kv_heads, -1).transpose(0, 1)
    return k.bfloat16().float(), v.bfloat16().float()


def through(layer: torch.nn.Module, x: Tensor, attended: Tensor) -> Tensor:
    x = x + layer.self_attn.o_proj(attended)
    return x + layer.mlp(layer.post_attention_layernorm(x))


def prefill(model: RecallModel, sample: tasks.Sample) -> Text:
    spec = model.spec
    position = torch.arange(len(sample.prompt))
    x = model.model.embed_tokens(torch.tensor(sample.prompt))
    group = spec.heads // spec.kv_heads
    kv = []
    for layer in model.model.layers:
        q = heads_of(layer, x, position, spec).transpose(0, 1)
        k, v = keys_of(layer, x, position, spec)
        wide = (t.repeat_interleave(group, 0).bfloat16()[None] for t in (k, v))
        out = F.scaled_dot_product_attention(q.bfloat16()[None], *wide, is_causal=True)[0].float()
        x = through(layer, x, out.transpose(0, 1).reshape(len(x), -1))
        kv.append((k, v))
    logits = model.logits(model.model.norm(x[-1:]))
    return Text(sample, int(logits.argmax()), kv)


def page_scores(variant: Variant, q: Tensor, pages: Tensor) -> Tensor:
    """Scores [HQ, N] for ``q`` [H, G, D], scaled, of ``pages`` [H, N, S, D]."""
    kind, _, count = variant.digest.partition("-")
    if kind == "exact":
        u = torch.einsum("hgd,hnsd->hgns", q, pages).amax(-1)
    elif kind == "signs":
        u = torch.einsum("hgd,hnsd->hgns", q, torch.where(torch.signbit(pages), -1.0, 1.0)).amax(-1)
    elif kind in ("mean", "gauss"):
        u = torch.einsum("hgd,hnd->hgn", q, pages.mean(2))
        if kind == "gauss":
            variance = pages.var(2, unbiased=False)
            u = u + 2 * torch.einsum("hgd,hnd->hgn", q.square(), variance).sqrt()
    else:
        boxes = pages.unflatten(2, (int(count), -1))
        u = torch.einsum("hgd,hnbd->hgnb", q.clamp(min=0), boxes.amax(3))
        u = (u + torch.einsum("hgd,hnbd->hgnb", q.clamp(max=0), boxes.amin(3))).amax(-1)
    return u.flatten(0, 1)


def reduced(how: str, u: Tensor) -> Tensor:
    """[HQ, N] -> [N]; as ops/score.py, and "stand-out" as ops/signs.py."""
    if how == "mass":
        return u.softmax(-1).sum(0)
    if how == "max":
        return (u - u.logsumexp(-1, keepdim=True)).amax(0)
    if how == "sum":
        return u.sum(0)
    return ((u - u.mean(-1, keepdim=True)) / u.std(-1, keepdim=True)).amax(0)


def kept_tokens(variant: Variant, q: Tensor, keys: Tensor, position: int, budget: int) -> Tensor:
    """[position + 1] bool: the tokens that a query at ``position`` attends to."""
    size = variant.page_tokens
    full, chosen = position // size, budget // size
    keep = torch.ones(position + 1, dtype=torch.bool)
    if full <= chosen:
        return keep
    pages = keys[:, : full * size].unflatten(1, (full, size))
    score = reduced(variant.reduce, page_scores(variant, q, pages))
    score[[0, -1]] = torch.inf
    is_chosen = torch.zeros(full, dtype=torch.bool)
    is_chosen[score.topk(chosen).indices] = True
    keep[: full * size] = is_chosen.repeat_interleave(size)
    return keep


def answer(model: RecallModel, text: Text, variant: Variant, budget: int) -> list[int]:
    """Greedy decoding of as many tokens as the right answer has."""
    spec, sample = model.spec, text.sample
    group, scale = spec.heads // spec.kv_heads, spec.head_dim**-0.5
    room = torch.zeros(spec.kv_heads, len(sample.answer), spec.head_dim)
    cache = [(torch.cat([k, room], 1), torch.cat([v, room], 1)) for k, v in text.kv]
    given = [text.first]
    while len(given) < len(sample.answer) and given[-1] != tasks.END:
        position = len(sample.prompt) + len(given) - 1
        at = torch.tensor([position])
        x = model.model.embed_tokens(torch.tensor([given[-1]]))
        ahead: Tensor | None = None
        layers = list(model.model.layers)
        for number, (layer, (keys, values)) in enumerate(zip(layers, cache, strict=True)):
            q = heads_of(layer, x, at, spec)[0]
            k, v = keys_of(layer, x, at, spec)
            keys[:, position], values[:, position] = k[:, 0], v[:, 0]
            real = variant.query == "real" or (variant.query == "real in 1" and number == 1)
            chooser = q if ahead is None or real else ahead
            grouped = chooser.view(spec.kv_heads, group, -1) * scale
            keep = torch.ones(position + 1, dtype=torch.bool)
            if number not in variant.dense_layers:
                keep = kept_tokens(variant, grouped, keys, position, budget)
            logits = torch.einsum(
                "hgd,htd->hgt", q.view(spec.kv_heads, group, -1) * scale, keys[:, : position + 1]
            )
            weights = logits.masked_fill(~keep, -torch.inf).softmax(-1)
            out = torch.einsum("hgt,htd->hgd", weights, values[:, : position + 1])
            if number + 1 < len(layers):
                ahead = heads_of(layers[number + 1], x, at, spec)[0]
            x = through(layer, x, out.reshape(1, -1))
        given.append(int(model.logits(model.model.norm(x)).argmax()))
    return given


def digest_bytes(variant: Variant, spec: RecallSpec) -> int:
    """Of one page and KV head."""
    kind, _, count = variant.digest.partition("-")
    vectors = {"minmax": 2 * int(count or 1), "mean": 1, "gauss": 2}
    if kind == "signs":
        return variant.page_tokens * spec.head_dim // 8
    if kind == "exact":
        return variant.page_tokens * spec.head_dim * TOKEN_BYTES
    return vectors[kind] * spec.head_dim * TOKEN_BYTES


def study(args: argparse.Namespace, writer: Writer, progress: Progress) -> None:
    model = load_model(MODEL)
    for length in args.lengths:
        progress.say(f"prefilling {args.samples * len(tasks.TASKS)} texts of {length} tokens")
        texts = [
            prefill(model, tasks.make_sample(task, length, FIRST_SEED + i))
            for task in tasks.TASKS
            for i in range(args.samples)
        ]
        variants = [v for v in STUDY if args.only in v.name]
        for budget, variant in itertools.product(args.budgets, variants):
            by_task = dict.fromkeys(tasks.TASKS, 0)
            for text in texts:
                given = answer(model, text, variant, budget)
                sample = text.sample
                by_task[sample.task] += tasks.is_correct(sample.task, sample.answer, given)
            right = sum(by_task.values())
            low, high = wilson_interval(right, len(texts))
            writer.add(
                variant.name,
                digest=variant.digest,
                query=variant.query,
                reduce=variant.reduce,
                page_tokens=variant.page_tokens,
                dense_layers=variant.dense_layers,
                budget_tokens=budget,
                length_tokens=length,
                digest_bytes=digest_bytes(variant, model.spec),
                right=right,
                asked=len(texts),
                low=low,
                high=high,
                by_task=by_task,
                untimed=True,
            )
            progress.say(
                f"{length} tokens, budget {budget}: {variant.name:<48} {right} of {len(texts)}"
            )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE")
    add("--lengths", nargs="+", type=int, default=[2048, 8192], metavar="TOKENS")
    add("--budgets", nargs="+", type=int, default=[256, 512, 1024], metavar="TOKENS")
    add("--samples", type=int, default=6, help="of each task and length")
    add("--only", default="", metavar="TEXT", help="ways whose names contain it")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    writer = Writer(args.json, environment("selection_study", ("torch",)))
    try:
        with torch.no_grad():
            study(args, writer, Progress())
    finally:
        writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
