"""Training of the retrieval model: same seed, same losses; the export; the score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmark.accuracy import tasks, vocabulary
from benchmark.accuracy.recall_training import train as trm
from benchmark.accuracy.recall_training.batches import count_correct, make_batch
from benchmark.accuracy.recall_training.init import init_weights
from benchmark.accuracy.recall_training.model import RecallModel, RecallSpec, export_model
from benchmark.accuracy.scoring import wilson_interval

SPEC = RecallSpec(layers=2)
PLAN = trm.Plan(
    (trm.Stage(128, 4, 3, jump_share=0.5), trm.Stage(320, 2, 3, jump_share=0.5)), warmup_steps=4
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses(plan: trm.Plan, steps: int | None = None) -> list[float]:
    trainer = trm.Trainer(plan, SPEC)
    for _ in range(steps or plan.steps):
        trainer.train_step()
    return trainer.losses


@pytest.mark.slow
def test_same_seed_gives_the_same_losses():
    first = losses(PLAN)
    assert losses(PLAN, 4) == first[:4]
    assert losses(replace(PLAN, seed=1), 1) != first[:1]


def test_exported_model_and_tokenizer_load_as_they_were_written(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = RecallModel(RecallSpec())
    init_weights(model, 3)
    assert export_model(model, tmp_path / "model") <= 8 * 2**20
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, weights in theirs.named_parameters():
        assert torch.equal(weights, model.get_parameter(name).bfloat16().float()), name
    assert theirs.config.rope_parameters["rope_theta"] == 1e8
    sample = tasks.make_sample("recall", 200, 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer(sample.prompt_text).input_ids == sample.prompt


def test_scores_and_interval():
    document = tasks.make_document({"multi_value": 1.0}, 256, 5, 0.4, 1)
    batch = make_batch([document], [np.arange(256)])
    predicted = batch.tokens.roll(-1, 1)
    (right, asked) = count_correct(batch, predicted)["multi_value"]
    assert right == asked > 0
    _, begin, _ = document.answers[0]
    # Another value first is also right, a number that is not one of the values is not.
    predicted[0, begin - 1] = batch.tokens[0, begin + 2]
    assert count_correct(batch, predicted)["multi_value"][0] == asked
    predicted[0, begin - 1] = vocabulary.ID_OF["0"]
    assert count_correct(batch, predicted)["multi_value"][0] == asked - 1
    low, high = wilson_interval(19, 20)
    assert 0.75 < low < 0.95 < high <= 1.0
