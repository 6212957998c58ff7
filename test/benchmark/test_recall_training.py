"""Training of the retrieval model: same seed, same losses; resumed as if never interrupted."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from benchmark.accuracy.recall_training import model as recall_model
from benchmark.accuracy.recall_training import train as trm
from benchmark.accuracy.recall_training.evaluate import (
    count_correct,
    evaluate,
    format_table,
    jump_positions,
    make_batch,
    wilson_interval,
)
from benchmark.accuracy.recall_training.init import init_weights
from benchmark.accuracy.recall_training.model import RecallModel, RecallSpec, export_model, tasks

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


@pytest.fixture(scope="module")
def whole():
    """Losses of an uninterrupted run."""
    torch.set_num_threads(1)
    return losses(PLAN)


def test_same_seed_gives_the_same_losses(whole):
    assert losses(PLAN, 4) == whole[:4]
    assert losses(replace(PLAN, seed=1), 1) != whole[:1]


def test_weight_of_count_changes_only_texts_with_counts(whole):
    focused = replace(PLAN, stages=tuple(replace(s, count_focus=4.0) for s in PLAN.stages))
    assert losses(focused, 1) != whole[:1]
    document = tasks.make_document({"count": 1.0}, 500, 3, max_count=1)
    ones = [int(document.tokens[begin]) for _, begin, _ in document.answers]
    assert set(ones) == {tasks.ID_OF["1"]}


def test_stages_and_rates_follow_the_plan():
    assert [PLAN.stage_of(step).length_tokens for step in (0, 2, 3, 5)] == [128, 128, 320, 320]
    plan = replace(trm.FULL_PLAN, lr=1.0)
    rates = [plan.lr_at(step) for step in (0, 99, plan.steps // 2, plan.steps - 1)]
    assert rates[0] == 0.01 and rates[1] == rates[2] == 1.0 and rates[3] == 0.02


def test_training_lowers_the_loss():
    plan = trm.Plan((trm.Stage(128, 2, 12),), warmup_steps=3, lr=3e-3)
    curve = losses(plan)
    assert np.mean(curve[-4:]) < 0.85 * np.mean(curve[:4])


def test_resumed_run_equals_an_uninterrupted_one(tmp_path, whole):
    trainer = trm.Trainer(PLAN, SPEC)
    for _ in range(2):
        trainer.train_step()
    trainer.save(tmp_path)
    resumed = trm.Trainer.load(tmp_path)
    assert resumed.plan == PLAN and resumed.spec == SPEC
    while resumed.step < PLAN.steps:
        resumed.train_step()
    assert resumed.losses[2:] == whole[2:]


def test_resume_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        trm.Trainer.load(tmp_path)


@pytest.mark.parametrize("style", ["random", "shift", "induction"])
def test_exported_model_is_the_same_function_in_transformers(tmp_path, style):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = RecallModel(RecallSpec())
    init_weights(model, 3, style)
    size_bytes = export_model(model, tmp_path / "model", "card")
    assert size_bytes <= 8 * 2**20
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
        # Below and above the length at which attention changes its implementation.
        for length in (200, 400):
            sample = tasks.make_sample("recall", length, 1)
            assert tokenizer(sample.prompt_text).input_ids == sample.prompt
            ids = torch.tensor([sample.prompt])
            torch.testing.assert_close(model(ids), theirs(ids).logits, atol=2e-3, rtol=1e-3)


def test_any_text_survives_the_tokenizer():
    tokenizer = recall_model.build_tokenizer()
    text = "Dear reader, 12345 ünïcode\n amber river = 42 17 ;"
    assert tokenizer.decode(tokenizer(text).input_ids) == " " + text
    assert len(tokenizer) <= tasks.VOCAB_TOKENS


def attention_weights(model: RecallModel, layer: int, x: torch.Tensor) -> torch.Tensor:
    """[HQ, T, T] of the residual stream ``x`` [T, d] before ``layer``."""
    spec, block = model.spec, model.model.layers[layer]
    cos, sin = recall_model.rope_tables(torch.arange(len(x))[None], spec)
    normed = block.input_layernorm(x)
    attn = block.self_attn
    q = attn.q_norm(attn.q_proj(normed).view(len(x), spec.heads, -1)).transpose(0, 1)
    k = attn.k_norm(attn.k_proj(normed).view(len(x), spec.kv_heads, -1)).transpose(0, 1)
    q, k = (recall_model.apply_rope(t[None], cos, sin)[0] for t in (q, k))
    k = k.repeat_interleave(spec.heads // spec.kv_heads, 0)
    scores = q @ k.transpose(1, 2) * spec.head_dim**-0.5
    return (scores + torch.full(scores.shape[1:], -torch.inf).triu(1)).softmax(-1)


@torch.no_grad()
def test_hand_written_heads_read_the_tokens_just_before():
    model = RecallModel(RecallSpec())
    init_weights(model, 0, "shift")
    document = tasks.make_document(trm.TASK_WEIGHTS, 2000, 4, 0.1)
    x = model.model.embed_tokens.weight[torch.from_numpy(document.tokens)]
    weights = attention_weights(model, 0, x)
    rows = torch.arange(10, 2000)
    for head, offset in enumerate((1, 2, 3)):
        assert weights[head, rows, rows - offset].mean() > 0.9


@torch.no_grad()
def test_hand_written_heads_find_the_key_before_any_training():
    model = RecallModel(RecallSpec())
    init_weights(model, 0, "induction")
    document = tasks.make_document({"recall": 1.0}, 200, 4)
    text = document.tokens.tolist()
    tokens = torch.from_numpy(document.tokens)[None]
    seen: list[torch.Tensor] = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(tokens)
    hook.remove()
    weights = attention_weights(model, 1, seen[0][0]).mean(0)
    found = []
    for _, begin, _ in document.answers:
        key = text[begin - 3 : begin]
        home = next(i for i in range(len(text)) if text[i : i + 3] == key) + 3
        found.append(float(weights[begin - 1, home]))
    assert np.mean(found) > 20 / 200  # a token at random gets 1/200


def test_positions_jump_only_between_statements():
    rng = np.random.default_rng(0)
    document = tasks.make_document(trm.TASK_WEIGHTS, 256, 5)
    positions = jump_positions(document.tokens, rng, 5000)
    gaps = np.diff(positions)
    assert positions[0] == 0 and gaps.min() == 1 and gaps.max() > 1
    assert (document.tokens[:-1][gaps > 1] == tasks.END).all()
    assert positions[-1] < 5000 + 256


def test_scores_and_interval():
    document = tasks.make_document({"multi_value": 1.0}, 256, 5, 0.4, 1)
    batch = make_batch([document], [np.arange(256)])
    predicted = batch.tokens.roll(-1, 1)
    (right, asked) = count_correct(batch, predicted)["multi_value"]
    assert right == asked > 0
    _, begin, _ = document.answers[0]
    # Another value first is right as well, a number that is none of the values is not.
    predicted[0, begin - 1] = batch.tokens[0, begin + 2]
    assert count_correct(batch, predicted)["multi_value"][0] == asked
    predicted[0, begin - 1] = tasks.ID_OF["0"]
    assert count_correct(batch, predicted)["multi_value"][0] == asked - 1
    low, high = wilson_interval(19, 20)
    assert 0.75 < low < 0.95 < high <= 1.0


def test_evaluation_covers_what_was_asked_and_makes_a_table():
    model = RecallModel(SPEC)
    init_weights(model, 0)
    rows = list(evaluate(model, [128, 300], 1, names=("recall", "copy")))
    assert [(row["length_tokens"], row["task"]) for row in rows] == [
        (128, "recall"),
        (128, "copy"),
        (300, "recall"),
        (300, "copy"),
    ]
    assert all(row["asked"] > 0 for row in rows)
    table = format_table(rows).splitlines()
    assert len(table) == 5 and table[0].count("|") == 4


def test_card_says_how_it_was_made(tmp_path):
    from benchmark.accuracy.recall_training.card import make_card

    trainer = trm.Trainer(PLAN, SPEC)
    progress = {"step": 2, "steps": PLAN.steps, "seen_tokens": 1_000_000, "loss": 1.5}
    plan = asdict(PLAN)
    card = make_card(trainer.model, plan, progress, "abc123", trm.score_table(tmp_path / "none", 2))
    assert "commit abc123" in card and "step 2 of 6" in card and "1.0 M tokens" in card
    assert "written by hand" in card and "run `--eval` first" in card
    rows = [
        {"length_tokens": 128, "task": "recall", "share": 0.5, "low": 0.3, "high": 0.7, "step": 2}
    ]
    (tmp_path / "scores.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "50.0% (30.0% to 70.0%)" in trm.score_table(tmp_path / "scores.jsonl", 2)
    assert "run `--eval` first" in trm.score_table(tmp_path / "scores.jsonl", 3)
