#!/usr/bin/env python3
"""Train the small retrieval model from scratch on this machine: seeded, resumable, no network.

The texts are those of benchmark/accuracy/tasks.py, made on the fly: step and row seed each of them,
so a resumed run sees what an uninterrupted one would have seen. Lengths grow stage by stage. The
loss counts the answers, of which every text has dozens, and a little of everything else.

    python -m benchmark.accuracy.recall_training.train --minutes 480          # again with --resume to go on
    python -m benchmark.accuracy.recall_training.train --smoke                # half a minute
    python -m benchmark.accuracy.recall_training.train --eval --lengths 1024,4096,8192
    python -m benchmark.accuracy.recall_training.train --export DIR           # the folder that SGLang loads
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.accuracy.recall_training.card import commit_of, make_card
from benchmark.accuracy.recall_training.evaluate import (
    Batch,
    count_correct,
    evaluate,
    format_table,
    jump_positions,
    make_batch,
)
from benchmark.accuracy.recall_training.init import STYLES, init_weights
from benchmark.accuracy.recall_training.model import RecallModel, RecallSpec, export_model, tasks

REPO = Path(__file__).resolve().parents[3]
WORK_DIR = REPO / ".cache" / "recall_model"
LM_WEIGHT = 0.03  # of the loss of all tokens beside that of the answers


@dataclass(frozen=True)
class Stage:
    """``steps`` optimizer steps over ``rows`` texts of ``length_tokens`` each."""

    length_tokens: int
    rows: int
    steps: int
    question_share: float = 0.5
    jump_share: float = 0.0  # of the rows: some gaps between statements count as many positions
    max_count: int = tasks.MAX_COUNT
    count_focus: float = 1.0  # weight of the answers of count, each of which is one number only


@dataclass(frozen=True)
class Plan:
    """A training run; with the code it determines every loss."""

    stages: tuple[Stage, ...]
    seed: int = 0
    lr: float = 1e-3
    warmup_steps: int = 100
    decay_share: float = 0.3  # of all steps, at the end: the rate falls to a fiftieth
    weight_decay: float = 0.05
    init: str = "induction"
    dtype: str = "bfloat16"
    max_jump_tokens: int = 12_000

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage_of(self, step: int) -> Stage:
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]

    def lr_at(self, step: int) -> float:
        decay_steps = max(1, int(self.steps * self.decay_share))
        left = (self.steps - step) / decay_steps
        return self.lr * min(1.0, (step + 1) / self.warmup_steps, max(left, 0.02))


FULL_PLAN = Plan(
    (
        Stage(128, 32, 1150, jump_share=0.3, max_count=9),
        Stage(256, 16, 300, jump_share=0.5, max_count=9),
        Stage(512, 8, 309, jump_share=0.5, max_count=9),
        Stage(256, 16, 400, jump_share=0.5, count_focus=4),
        Stage(512, 8, 400, jump_share=0.5, count_focus=4),
        Stage(1024, 4, 400, 0.4, 0.5, count_focus=4),
        Stage(2048, 2, 600, 0.3, 0.5, count_focus=4),
        Stage(4096, 1, 1000, 0.25, 0.3, count_focus=4),
        Stage(8192, 1, 250, 0.1, count_focus=4),
    )
)
SMOKE_PLAN = Plan((Stage(128, 16, 40),), warmup_steps=10)
# Tasks that are learned in the first minutes get less of the texts.
TASK_WEIGHTS = {
    "recall": 0.7,
    "needle": 0.5,
    "multi_key": 1.0,
    "multi_value": 1.6,
    "variables": 1.0,
    "copy": 1.0,
    "count": 1.2,
}


def training_batch(plan: Plan, step: int) -> Batch:
    stage = plan.stage_of(step)
    documents, positions = [], []
    for row in range(stage.rows):
        seeds = [plan.seed, step, row]
        document = tasks.make_document(
            TASK_WEIGHTS | {"count": TASK_WEIGHTS["count"] * min(2.0, stage.count_focus)},
            stage.length_tokens,
            seeds,
            stage.question_share,
            max_count=stage.max_count,
        )
        rng = np.random.default_rng([*seeds, 1])
        jump = rng.random() < stage.jump_share
        documents.append(document)
        positions.append(
            jump_positions(document.tokens, rng, plan.max_jump_tokens)
            if jump
            else np.arange(stage.length_tokens)
        )
    return make_batch(documents, positions)


class Trainer:
    """Model, optimizer and counters; every step is a function of them and of the plan."""

    def __init__(self, plan: Plan, spec: RecallSpec, device: str = "cpu") -> None:
        self.plan, self.spec, self.step = plan, spec, 0
        self.seen_tokens = 0
        self.losses: list[float] = []
        self.model = RecallModel(spec)
        init_weights(self.model, plan.seed, plan.init)
        self.model.to(device)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": plan.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=plan.lr,
            betas=(0.9, 0.98),
            eps=1e-9,
            foreach=True,
        )

    def train_step(self) -> dict[str, list[int]]:
        """One optimizer step; appends to ``losses`` and returns [right, asked] per task."""
        batch = training_batch(self.plan, self.step)
        dtype = getattr(torch, self.plan.dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr_at(self.step)
        tokens = batch.tokens.to(self.model.device)
        asked = batch.is_answer.to(self.model.device)
        hidden = self.model.hidden(tokens, batch.positions.to(self.model.device), dtype)
        following = tokens.roll(-1, 1)
        logits = self.model.logits(hidden[asked]).float()
        weights = torch.ones(tokens.shape)
        for row, task, begin, _ in batch.answers:
            if task == "count":
                weights[row, begin - 1] = self.plan.stage_of(self.step).count_focus
        weights = weights[batch.is_answer].to(self.model.device)
        losses = F.cross_entropy(logits, following[asked], reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        some = slice(0, max(1, len(hidden) // 4))
        lm_logits = self.model.logits(hidden[some, :-1]).float().flatten(0, 1)
        lm_loss = F.cross_entropy(lm_logits, following[some, :-1].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        (loss + LM_WEIGHT * lm_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.seen_tokens += batch.tokens.numel()
        self.losses.append(loss.item())
        predicted = torch.zeros_like(batch.tokens)
        predicted[batch.is_answer] = logits.argmax(-1).cpu()
        return count_correct(batch, predicted)

    def save(self, folder: Path) -> None:
        """Weights, moments and counters in ``folder``, complete or not at all."""
        from safetensors.torch import save_file

        tensors = {f"w.{name}": p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{key}.{name}"] = self.optimizer.state[p][key]
        state = {
            "step": self.step,
            "seen_tokens": self.seen_tokens,
            "plan": asdict(self.plan),
            "spec": asdict(self.spec),
            "losses": [round(loss, 5) for loss in self.losses],
        }
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / "checkpoint.tmp"
        save_file(tensors, fresh, metadata={"state": json.dumps(state)})
        os.replace(fresh, folder / "checkpoint.safetensors")

    @staticmethod
    def load(folder: Path, plan: Plan | None = None, device: str = "cpu") -> Trainer:
        """The run saved in ``folder``; with ``plan``, it goes on by that one."""
        from safetensors import safe_open

        path = folder / "checkpoint.safetensors"
        if not path.exists():
            raise FileNotFoundError(f"no checkpoint in {folder}; train first, without --resume")
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["state"])
            saved = dict(state["plan"])
            saved["stages"] = tuple(Stage(**stage) for stage in saved["stages"])
            trainer = Trainer(plan or Plan(**saved), RecallSpec(**state["spec"]), device)
            with torch.no_grad():
                for name, p in trainer.model.named_parameters():
                    p.copy_(file.get_tensor(f"w.{name}"))
                    trainer.optimizer.state[p] = {
                        "step": torch.tensor(float(state["step"])),
                        "exp_avg": file.get_tensor(f"exp_avg.{name}").to(device),
                        "exp_avg_sq": file.get_tensor(f"exp_avg_sq.{name}").to(device),
                    }
        trainer.step, trainer.seen_tokens = state["step"], state["seen_tokens"]
        trainer.losses = state["losses"]
        return trainer


def run(trainer: Trainer, minutes: float, folder: Path, save_minutes: float = 3.0) -> None:
    """Trains until the plan is done or the time is over, with a line of progress every 20 steps.

    SIGTERM and SIGINT save a checkpoint and end it after the step at hand.
    """
    plan, begin = trainer.plan, time.monotonic()
    last_save = last_line = begin
    score: dict[str, list[int]] = {}
    tokens = 0
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: stopped.append(got))
    while trainer.step < plan.steps and not stopped and time.monotonic() - begin < minutes * 60:
        for task, (right, asked) in trainer.train_step().items():
            entry = score.setdefault(task, [0, 0])
            entry[0] += right
            entry[1] += asked
        stage = plan.stage_of(trainer.step - 1)
        tokens += stage.rows * stage.length_tokens
        if trainer.step % 20 == 0 or trainer.step == plan.steps:
            now = time.monotonic()
            rate = tokens / (now - last_line)
            left = sum(
                s.rows * s.length_tokens
                for s in map(plan.stage_of, range(trainer.step, plan.steps))
            )
            shares = " ".join(
                f"{t} {score[t][0] / score[t][1]:.0%}" for t in tasks.TASKS if t in score
            )
            print(
                f"step {trainer.step}/{plan.steps} T={stage.length_tokens} "
                f"loss {np.mean(trainer.losses[-20:]):.3f} | {shares} | {rate:.0f} tokens/s, "
                f"plan done in {left / rate / 60:.0f} min",
                flush=True,
            )
            score, tokens, last_line = {}, 0, now
            if now - last_save > save_minutes * 60:
                trainer.save(folder)
                last_save = now
    trainer.save(folder)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def score_table(path: Path, step: int) -> str:
    """The scores in ``path`` as Markdown, if they are those of the weights after ``step``."""
    rows = read_rows(path)
    if not rows or any(row["step"] != step for row in rows):
        return "Not scored at this step; run `--eval` first."
    return format_table(rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=WORK_DIR, help="checkpoints (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--init", choices=STYLES, default="induction")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--smoke", action="store_true", help="40 short steps, in a folder beside")
    parser.add_argument("--eval", action="store_true", help="no training: score the checkpoint")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--texts", type=int, default=12, help="texts per task and length")
    parser.add_argument(
        "--fp32", action="store_true", help="score with products in float32, not bfloat16"
    )
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the model to DIR")
    args = parser.parse_args(argv)
    dtype = torch.float32 if args.fp32 else torch.bfloat16
    lengths = [128] if args.smoke else [int(n) for n in args.lengths.split(",")]
    folder = args.dir / "smoke" if args.smoke else args.dir
    if (args.eval or args.export) and not args.smoke:
        trainer = Trainer.load(folder, device=args.device)
    else:
        plan = replace(SMOKE_PLAN if args.smoke else FULL_PLAN, seed=args.seed, init=args.init)
        if args.resume:
            trainer = Trainer.load(folder, plan, args.device)
        else:
            trainer = Trainer(plan, RecallSpec(), args.device)
        run(trainer, args.minutes, folder)
    scores = folder / "scores.jsonl"
    if args.eval or args.smoke:
        # What was scored before at other lengths stays, if the weights are still the same.
        kept = [
            row
            for row in read_rows(scores)
            if row["step"] == trainer.step and row["length_tokens"] not in lengths
        ]
        with scores.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
            for row in evaluate(trainer.model, lengths, args.texts, dtype):
                line = json.dumps({**row, "step": trainer.step})
                print(line, file=file, flush=True)
                print(line, flush=True)
        print(score_table(scores, trainer.step))
    if args.export:
        card = make_card(
            trainer.model,
            asdict(trainer.plan),
            {
                "step": trainer.step,
                "steps": trainer.plan.steps,
                "seen_tokens": trainer.seen_tokens,
                "loss": float(np.mean(trainer.losses[-50:])),
            },
            commit_of(REPO),
            score_table(scores, trainer.step),
        )
        size_bytes = export_model(trainer.model, args.export, card)
        print(f"{args.export}: {size_bytes} bytes of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
