"""Does selection hold when digests are int8 (`sglang_scout.ops.digest_int8`) instead of bfloat16?

    python benchmark/digest_int8.py --json FILE

Keys of three kinds, pages of 32: ``random``; ``outliers``, random with a few channels ten times as large, as
keys of large models have them; ``model``, the keys (after RoPE) and the last queries of the trained model in
benchmark/accuracy/recall_model on its own tasks, in bfloat16. Only a device's memory traffic gets less, so
nothing is timed here.

Rows (format: rows.py, untimed), one per kind and k; impl is "int8":
    keys, pages, k            what was scored, and how many pages are chosen of them
    layers, queries, H, G, D  the mean is over layers and queries
    overlap, overlap_worst    share of the pages that bfloat16 digests choose, mean and smallest of all
    mass, mass_bf16           share of the attention weight in the pages that each chooses
    bytes_share               of int8 digests and steps, of the bytes of bfloat16 digests
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import rows
from sglang_scout.core.page_bytes import digest_bytes
from sglang_scout.ops.digest import digest_reference
from sglang_scout.ops.digest_int8 import code_reference, score_pages_int8
from sglang_scout.ops.score import score_pages

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark" / "accuracy"))
MODEL = ROOT / "benchmark" / "accuracy" / "recall_model"
S = 32
CHOSEN = (8, 16, 32, 64)


class Layer(NamedTuple):
    """Pages and queries of a layer: k [P, S, H, D] bfloat16, q [B, HQ, D] float32."""

    k: torch.Tensor
    q: torch.Tensor


def random_layers(outliers: bool) -> Iterator[Layer]:
    rng = torch.Generator().manual_seed(1)
    for _ in range(4):
        k = torch.randn(512, S, 4, 128, generator=rng)
        # Tokens that follow each other have keys alike: a common part per page.
        k = 0.7 * k + 0.7 * torch.randn(512, 1, 4, 128, generator=rng)
        if outliers:
            k[..., ::17] *= 10
        yield Layer(k.bfloat16(), torch.randn(8, 16, 128, generator=rng))


def model_layers(length_tokens: int, samples: int) -> Iterator[Layer]:
    import tasks
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3 import modeling_qwen3

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    turned: list[tuple[torch.Tensor, torch.Tensor]] = []
    rotate = modeling_qwen3.apply_rotary_pos_emb

    def keep(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        turned.append(rotate(*args, **kwargs))
        return turned[-1]

    modeling_qwen3.apply_rotary_pos_emb = keep
    try:
        for seed in range(samples):
            task = ("recall", "multi_key", "variables")[seed % 3]
            prompt = tasks.make_sample(task, length_tokens, 9000 + seed).prompt
            turned.clear()
            with torch.inference_mode():
                model(torch.tensor([prompt]), use_cache=False, logits_to_keep=1)
            for q, k in turned:  # [1, heads, T, D]; the last three tokens ask
                pages = k[0].transpose(0, 1)[: len(prompt) // S * S].unflatten(0, (-1, S))
                yield Layer(pages.bfloat16(), q[0, :, -3:].transpose(0, 1).contiguous())
    finally:
        modeling_qwen3.apply_rotary_pos_emb = rotate


def weights(layer: Layer) -> torch.Tensor:
    """Attention weight of every page, mean over heads: [B, P]."""
    H, D = layer.k.shape[2:]
    q = layer.q.unflatten(1, (H, -1)) * D**-0.5
    s = torch.einsum("bhgd,pshd->bhgps", q, layer.k.float()).flatten(3)
    return s.softmax(-1).unflatten(-1, (-1, S)).sum(-1).mean((1, 2))


def compare(layers: Iterator[Layer]) -> tuple[dict, dict[int, dict]]:
    """Sizes, and for each k the means."""
    found: dict[int, list[tuple[torch.Tensor, ...]]] = {k: [] for k in CHOSEN}
    count, sizes = 0, {}
    for layer in layers:
        (P, _, H, D), (B, HQ) = layer.k.shape, layer.q.shape[:2]
        digests = digest_reference(layer.k)
        table = torch.arange(P, dtype=torch.int32).repeat(B, 1)
        full, scale = torch.full((B,), P, dtype=torch.int32), D**-0.5
        exact = score_pages(layer.q, *digests, table, full, scale)
        loose = score_pages_int8(layer.q, code_reference(*digests), table, full, scale)
        mass = weights(layer)
        for k in (k for k in CHOSEN if k < P):
            want, got = (x.topk(k).indices for x in (exact, loose))
            same = (want[:, :, None] == got[:, None, :]).any(2).float().mean(1)
            found[k].append((same, mass.gather(1, got).sum(1), mass.gather(1, want).sum(1)))
        count += 1
        sizes = {"pages": P, "queries": B, "H": H, "G": HQ // H, "D": D, "layers": count}
    results = {}
    for k, parts in found.items():
        if parts:
            overlap, mass, mass_exact = (torch.cat(x) for x in zip(*parts, strict=True))
            results[k] = {
                "overlap": round(float(overlap.mean()), 4),
                "overlap_worst": round(float(overlap.min()), 4),
                "mass": round(float(mass.mean()), 4),
                "mass_bf16": round(float(mass_exact.mean()), 4),
            }
    return sizes, results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="JSON lines")
    parser.add_argument("--length-tokens", type=int, default=8192, help="of the model's prompts")
    parser.add_argument("--samples", type=int, default=6, help="prompts of the model")
    arguments = parser.parse_args()
    writer = rows.Writer(arguments.json, rows.environment("digest_int8", ("torch", "transformers")))
    kinds = {
        "random": random_layers(outliers=False),
        "outliers": random_layers(outliers=True),
        "model": model_layers(arguments.length_tokens, arguments.samples),
    }
    for keys, layers in kinds.items():
        sizes, results = compare(layers)
        int8, bf16 = (digest_bytes(form, 1, sizes["D"], 2) for form in ("minmax-int8", "minmax"))
        for k, means in results.items():
            writer.add(
                "int8", untimed=True, keys=keys, k=k, bytes_share=int8 / bf16, **sizes, **means
            )
            print(f"{keys:9} k={k:3} of {sizes['pages']}: {means}", flush=True)
    writer.close()


if __name__ == "__main__":
    main()
