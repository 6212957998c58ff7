"""The card (README.md) that goes with the small retrieval model."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from benchmark.accuracy.recall_training.model import RecallModel, tasks

BY_HAND = {
    "random": "No weight was written by hand.",
    "shift": (
        "Before the training, three heads of layer 0 were written by hand: they read the token 1, "
        "2 and 3 places back. All weights were trained from there."
    ),
    "induction": (
        "Before the training, two layers of heads were written by hand: three heads of layer 0 "
        "read the token 1, 2 and 3 places back, and the heads of layer 1 compare what stands at 0, "
        "1 and 2 places back of the query with what stands 1, 2 and 3 places back of a key and "
        "copy the token found there. Untrained, these heads look at the right place more often "
        "than at any other but answer few questions. All weights were trained from there."
    ),
}


def commit_of(repo: Path) -> str:
    """The commit of the working tree, marked when the training code differs from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=repo, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD") or "unknown"
    changed = git("status", "--porcelain", "--", "scripts", "benchmark/accuracy")
    return commit + (" with local changes" if changed else "")


def make_card(
    model: RecallModel, plan: dict[str, Any], progress: dict[str, Any], commit: str, scores: str
) -> str:
    """Markdown. ``progress``: steps, planned steps, tokens seen, share of the answers' loss;
    ``scores``: a table or what to say in its place."""
    spec = model.spec
    parameters = sum(p.numel() for p in model.parameters())
    stages = "\n".join(
        f"| {s['length_tokens']} | {s['rows']} | {s['steps']} | {s['jump_share']:.0%} | "
        f"{s['max_count']} | {s['count_focus']:g} |"
        for s in plan["stages"]
    )
    samples = "\n".join(
        f"    {tasks.to_text(sample.prompt[-4:])}  ->  {sample.answer_text}"
        for sample in (tasks.make_sample(task, 256, 1) for task in tasks.TASKS)
    )
    return f"""# A small model that retrieves

A Qwen3 decoder ({spec.layers} layers, hidden {spec.hidden}, {spec.heads} query heads and \
{spec.kv_heads} KV heads of {spec.head_dim}, MLP {spec.intermediate}, rotary base \
{spec.rope_base:.0e}, tied embeddings, {parameters / 1e6:.2f} M parameters, bfloat16), trained from \
scratch on synthetic texts to look things up in a long context. It knows no language: it is there \
to show whether a KV cache that reads only a part of the context still reads the right part.

## How it was made

`benchmark/accuracy/recall_training/train.py --seed {plan["seed"]} --init {plan["init"]}` at commit {commit}: \
step {progress["step"]} of {progress["steps"]}, {progress["seen_tokens"] / 1e6:.1f} M tokens, AdamW, \
rate {plan["lr"]}, products in {plan["dtype"]}, loss of the answers over the last 50 steps \
{progress["loss"]:.3f}. {BY_HAND[plan["init"]]}

| text length (tokens) | texts per step | steps | with position jumps | count up to | weight of count |
| ---: | ---: | ---: | ---: | ---: | ---: |
{stages}

In texts with position jumps, positions are pulled apart at statement ends by up to \
{plan["max_jump_tokens"]} tokens in all, which teaches long distances on short texts. The rate falls \
over the last {plan["decay_share"]:.0%} of the steps. The texts come from `benchmark/accuracy/tasks.py`; the same seed \
gives the same losses with the same number of threads on the same kind of processor; with another \
number they differ by rounding, which grows with the steps.

## How to ask it

A prompt begins with `#`, holds statements and filler in any order, and ends with a question; words \
are separated by single spaces and each is one token. Answers end with `;`. For example:

{samples}

`make_sample` in `benchmark/accuracy/tasks.py` writes such prompts. Other text is read as bytes, \
which the model has never seen.

## Scores

Full attention, held-out texts, exact answers (every token, greedy), with 95 % intervals:

{scores}

The answers are scored as a whole by the likeliest token at each place, with the right tokens before it,
which is greedy decoding except that `multi_value` sees its earlier values. Several questions share a text,
so the true intervals are wider. The curriculum was steered by looking at these texts: for figures to
publish, take samples of other seeds.
"""
