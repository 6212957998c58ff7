"""Train the small retrieval model from scratch on this machine: seeded, resumable, no network.

The texts are those of benchmark/accuracy/tasks.py, made on the fly: step and row seed each of them,
so a resumed run sees what an uninterrupted one would have seen. Lengths grow stage by stage. The
loss counts the answers, of which every text has dozens, and a little of everything else.

    python -m benchmark.accuracy.recall_training.train --minutes 480          # again with --resume to go on
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

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.accuracy import tasks
from benchmark.accuracy.recall_training.evaluate import (
    Batch,
    count_correct,
    evaluate,
    jump_positions,
    make_batch,
)
from benchmark.accuracy.recall_training.init import init_weights
from benchmark.accuracy.recall_training.model import RecallModel, RecallSpec, export_model

WORK_DIR = Path(__file__).resolve().parents[3] / ".cache" / "recall_model"
SAVE_S = 180.0
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

    def __init__(self, plan: Plan, spec: RecallSpec) -> None:
        self.plan, self.spec, self.step = plan, spec, 0
        self.seen_tokens = 0
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
        hidden = self.model.hidden(tokens, batch.positions, torch.bfloat16)
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
        self.seen_tokens += batch.tokens.numel()
        self.losses.append(loss.item())
        predicted = torch.zeros_like(tokens)
        predicted[asked] = logits.argmax(-1)
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
    def load(folder: Path, plan: Plan | None = None) -> Trainer:
        """The run saved in ``folder``; with ``plan``, it goes on by that one."""
        from safetensors import safe_open

        path = folder / "checkpoint.safetensors"
        if not path.exists():
            raise FileNotFoundError(f"no checkpoint in {folder}; train first, without --resume")
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["state"])
            saved = dict(state["plan"])
            saved["stages"] = tuple(Stage(**stage) for stage in saved["stages"])
            trainer = Trainer(plan or Plan(**saved), RecallSpec(**state["spec"]))
            with torch.no_grad():
                for name, p in trainer.model.named_parameters():
                    p.copy_(file.get_tensor(f"w.{name}"))
                    trainer.optimizer.state[p] = {
                        "step": torch.tensor(float(state["step"])),
                        "exp_avg": file.get_tensor(f"exp_avg.{name}"),
                        "exp_avg_sq": file.get_tensor(f"exp_avg_sq.{name}"),
                    }
        trainer.step, trainer.seen_tokens = state["step"], state["seen_tokens"]
        trainer.losses = state["losses"]
        return trainer


def run(trainer: Trainer, minutes: float, folder: Path) -> None:
    """Trains until the plan is done or the time is over, with a line of progress every 20 steps.

    SIGTERM and SIGINT save a checkpoint and end it after the step at hand.
    """
    plan, end = trainer.plan, time.monotonic() + 60 * minutes
    last_save = time.monotonic()
    score: dict[str, list[int]] = {}
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: stopped.append(got))
    while trainer.step < plan.steps and not stopped and time.monotonic() < end:
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
        if time.monotonic() - last_save > SAVE_S:
            trainer.save(folder)
            last_save = time.monotonic()
    trainer.save(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dir", type=Path, default=WORK_DIR, help="checkpoints (%(default)s)")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, default=math.inf, help="stop after so long")
    add("--resume", action="store_true", help="go on from the checkpoint")
    add("--eval", action="store_true", help="no training: score the checkpoint, a JSON line each")
    add("--lengths", default="512,1024,2048,4096,8192")
    add("--texts", type=int, default=12, help="texts per task and length")
    add("--export", type=Path, metavar="DIR", help="write the model to DIR")
    args = parser.parse_args(argv)
    if not args.eval and not args.export:
        plan = replace(FULL_PLAN, seed=args.seed)
        trainer = Trainer.load(args.dir, plan) if args.resume else Trainer(plan, RecallSpec())
        run(trainer, args.minutes, args.dir)
        return 0
    trainer = Trainer.load(args.dir)
    if args.eval:
        for row in evaluate(trainer.model, [int(n) for n in args.lengths.split(",")], args.texts):
            print(json.dumps({**row, "step": trainer.step}), flush=True)
    if args.export:
        print(f"{args.export}: {export_model(trainer.model, args.export)} bytes of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
