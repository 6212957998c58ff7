"""Train the small retrieval model from scratch on this machine: seeded, no network.

    python -m benchmark.accuracy.recall_training.train DIR    # a night; DIR is the folder that SGLang loads

The texts are those of benchmark/accuracy/tasks.py, generated on the fly and seeded by step and row. Lengths grow stage
by stage. The loss is on the answers, of which every text has dozens, plus a small weight on all tokens. The suite
(benchmark/accuracy/suite.py) scores the model in benchmark/accuracy/recall_model.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.accuracy import tasks
from benchmark.accuracy.recall_training.batches import (
    Batch,
    count_correct,
    jump_positions,
    make_batch,
)
from benchmark.accuracy.recall_training.init import init_weights
from benchmark.accuracy.recall_training.model import RecallModel, RecallSpec, export_model

LM_WEIGHT = 0.03  # weight of the loss on all tokens, relative to that on answers


@dataclass(frozen=True)
class Stage:
    """``steps`` optimizer steps over ``rows`` texts of ``length_tokens`` each."""

    length_tokens: int
    rows: int
    steps: int
    question_share: float = 0.5
    jump_share: float = 0.0  # share of rows with position jumps between statements
    max_count: int = tasks.MAX_COUNT
    count_focus: float = 1.0  # weight of count's answers, which are one number each


@dataclass(frozen=True)
class Plan:
    """A training run; together with the code it determines every loss."""

    stages: tuple[Stage, ...]
    seed: int = 0
    lr: float = 1e-3
    warmup_steps: int = 100
    decay_share: float = 0.3  # share of steps at the end in which the rate decays to 1/50
    weight_decay: float = 0.05
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
# Tasks that are learned in the first minutes get a smaller share of the texts.
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

    def __init__(self, plan: Plan, spec: RecallSpec) -> None:
        self.plan, self.step = plan, 0
        self.losses: list[float] = []
        self.model = RecallModel(spec)
        init_weights(self.model, plan.seed)
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
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr_at(self.step)
        tokens, asked = batch.tokens, batch.is_answer
        hidden = self.model.hidden(tokens, batch.positions)
        following = tokens.roll(-1, 1)
        logits = self.model.logits(hidden[asked]).float()
        weights = torch.ones(tokens.shape)
        for row, task, begin, _ in batch.answers:
            if task == "count":
                weights[row, begin - 1] = self.plan.stage_of(self.step).count_focus
        weights = weights[asked]
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
        self.losses.append(loss.item())
        predicted = torch.zeros_like(tokens)
        predicted[asked] = logits.argmax(-1)
        return count_correct(batch, predicted)


def run(trainer: Trainer) -> None:
    """Trains until the plan is done, with a line of progress every 20 steps."""
    plan = trainer.plan
    score: dict[str, list[int]] = {}
    while trainer.step < plan.steps:
        for task, (right, asked) in trainer.train_step().items():
            entry = score.setdefault(task, [0, 0])
            entry[0] += right
            entry[1] += asked
        if trainer.step % 20 and trainer.step != plan.steps:
            continue
        shares = " ".join(f"{t} {right / asked:.0%}" for t, (right, asked) in score.items())
        print(
            f"step {trainer.step}/{plan.steps} T={plan.stage_of(trainer.step - 1).length_tokens} "
            f"loss {np.mean(trainer.losses[-20:]):.3f} | {shares}",
            flush=True,
        )
        score = {}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write; an existing one is replaced")
    args = parser.parse_args(argv)
    trainer = Trainer(FULL_PLAN, RecallSpec())
    run(trainer)
    export_model(trainer.model, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
