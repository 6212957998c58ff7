#!/usr/bin/env python3
"""Makes the files by which pages are selected: a forecast of the next layer's selection, or a pilot's embeddings.

    .venv/bin/python scripts/train_forecast.py                  SmolLM2-135M, about 15 minutes on two CPU cores
    .venv/bin/python scripts/train_forecast.py --kind pilot
    .venv/bin/python scripts/train_forecast.py --model FOLDER   a Llama-, Qwen2- or Qwen3-shaped model

The model is frozen. What a text trains on is computed once, with full attention, so the first pass over the texts takes
most of the time. The loss is that of arXiv 2606.04511, section 4.4: benchmark/accuracy/forecast_training/loss.py.

forecast  initialized with the layer's own W_q, averaged over the query heads of a KV head, scaled for the norm of the
          layer whose input it is applied to
pilot     initialized with the principal directions of the queries of the first text, on a page's mean key

Prints the path of the file, for the key `forecast_file` or `pilot_file` of --kv-offload-config.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from tokenizers import Tokenizer
from torch import Tensor

from packages import CACHE, print_paths
from sglang_scout.core.forecast import Kind, load_weights
from sglang_scout.core.profile import ModelIdentity, config_digest
from smollm2 import smollm2
from texts import SOURCES, load_text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmark.accuracy.forecast_training.loss import PAGE_TOKENS  # noqa: E402
from benchmark.accuracy.forecast_training.trainer import Plan, Trainer, train  # noqa: E402
from benchmark.accuracy.study.model import Config, Model  # noqa: E402
from benchmark.rows import argument_parser  # noqa: E402


def identity_of(folder: Path) -> ModelIdentity:
    raw, config = json.loads((folder / "config.json").read_text()), Config.of(folder)
    sizes = config.layers, config.q_heads, config.kv_heads, config.head_dim
    return ModelIdentity(raw["architectures"][0], *sizes, config_digest(raw))


def texts_of(folder: Path, tokens: int, count: int) -> Callable[[int], Tensor]:
    """Text ``i``, cycling through those of scripts/texts.py; from their ends, as the accuracy study uses their starts.

    Raises:
        ValueError: they are too short for ``count`` texts.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = [
        torch.tensor(tokenizer.encode(load_text(kind), add_special_tokens=False).ids)
        for kind in SOURCES
    ]
    most = len(whole) * (min(map(len, whole)) // tokens)
    if count > most:
        raise ValueError(f"--texts: there are {most} of {tokens} tokens, one of them held out")

    def text(index: int) -> Tensor:
        turn, source = divmod(index, len(whole))
        end = len(whole[source]) - turn * tokens
        return whole[source][end - tokens : end]

    return text


def made(args: argparse.Namespace) -> Path:
    """The path of the file, created if missing.

    Raises:
        ValueError: inconsistent arguments, or a file of another model.
    """
    least = 8 * PAGE_TOKENS
    if args.tokens % PAGE_TOKENS or args.tokens < least:
        expected = f"a multiple of {PAGE_TOKENS} from {least} on"
        raise ValueError(f"--tokens {args.tokens}: expected {expected}")
    folder: Path = args.model or smollm2()
    out: Path = args.out or CACHE / "weights" / f"{folder.resolve().name}-{args.kind}.npz"
    identity = identity_of(folder)
    if out.exists():
        found = load_weights(str(out), args.kind).header.identity
        if found != identity:
            advice = "delete it, or name another --out"
            raise ValueError(f"{out}: is there, of {found.describe()}; {advice}")
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    sizes = args.steps, args.tokens, args.texts, args.lr, args.rank, args.top_pages, args.seed
    text = texts_of(folder, args.tokens, args.texts + 1)
    train(Trainer(Model(folder), identity, Plan(args.kind, *sizes), text), out)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    kinds = get_args(Kind)
    add("--kind", choices=kinds, default="forecast", help="which policy the file is for")
    add("--model", type=Path, help="folder in Hugging Face format (default: SmolLM2-135M)")
    add("--out", type=Path, help="file to write (default: .cache/weights/MODEL-KIND.npz)")
    add("--steps", type=int, default=400, help="training steps, each on one text")
    add("--tokens", type=int, default=2048, help="tokens per text, a multiple of 32")
    add("--texts", type=int, default=40, help="distinct texts")
    add("--lr", type=float, default=2e-3, help="initial learning rate, which decays linearly to 0")
    add("--rank", type=int, default=32, help="rank of a pilot")
    add("--top-pages", type=int, default=16, help="pages that the loss distinguishes")
    add("--seed", type=int, default=0, help="random seed")
    return print_paths("train_forecast", partial(made, parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
