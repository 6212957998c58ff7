"""The model of a decode step: against manual arithmetic, and against measured steps."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark.plot import draw_predictions
from benchmark.rows import read_rows
from sglang_scout.cli import gib, main
from sglang_scout.cli.plan import as_text
from sglang_scout.cli.sizes import make_plan
from sglang_scout.cli.step_model import (
    CAVEAT,
    DEVICES,
    MISSING_SHARE,
    TERMS,
    Device,
    Step,
    find_device,
    low_end,
    offload_step,
    predict,
    stock_step,
)

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
TOLERANCE = 0.15

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_size": 2048,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 14336,
    "vocab_size": 32000,
}


SIZES = {"context_tokens": 65536, "budget_tokens": 2048, "host_gib": 512, "gpu_gib": 80}


def plan_of(folder, **changes):
    return make_plan(str(folder), **SIZES | changes)


@pytest.mark.parametrize(
    ("changes", "total", "active"), [(QWEN3_30B_A3B, 30.5e9, 3.3e9), (MIXTRAL_8X7B, 46.7e9, 12.9e9)]
)
def test_experts_of_a_mixture(model, changes, total, active):
    """All take memory; a token uses some, a batch reads those that any of its tokens uses."""
    plan = plan_of(model(**changes), context_tokens=1024, host_gib=64, gpu_gib=160)
    found, server, device = plan.server.model, plan.server, DEVICES["b200"]
    assert math.isclose(found.weight_bytes, 2 * total, rel_tol=0.01)
    used = found.bytes_a_token
    assert math.isclose(used, 2 * active - found.embedding_bytes, rel_tol=0.03)
    one, all_ = (stock_step(server, device, batch).parts_us["weights"] for batch in (1, 512))
    rate = 8000e3 * 0.8
    assert one == pytest.approx(used / rate, rel=1e-3)
    assert all_ == pytest.approx((found.weight_bytes - found.embedding_bytes) / rate, rel=1e-3)
    assert f"of which a token uses {gib(found.bytes_a_token)}" in as_text(plan)


def test_a_step_of_the_papers_model_by_hand(model):
    plan = plan_of(model(), config='{"digest": "minmax"}')
    server, h100 = plan.server, DEVICES["h100"]
    rate = 3350e3 * 0.8  # bytes per microsecond
    step = offload_step(server, h100, 32)
    layer = (40 + 2 * 8 + 40) * 128 * 5120 + 3 * 5120 * 17408
    assert step.parts_us["weights"] == pytest.approx(2 * (40 * layer + 151936 * 5120) / rate)
    assert step.parts_us["look-ahead"] == pytest.approx(40 * 2 * 5120 * 5120 / rate)
    page = 2 * 8 * 128 * 2  # a minimum and a maximum
    assert step.parts_us["scores"] == pytest.approx(32 * 40 * 2048 * page / rate)
    kv = 32 * 2048 * 163840
    assert step.parts_us["attention"] == pytest.approx((1 - MISSING_SHARE) * kv / rate)
    both = 32 * 40 * 5120 * (2 + 2) + 32 * 163840
    assert step.parts_us["ring"] == pytest.approx(both / (64e3 * 0.8))
    assert step.us == pytest.approx(sum(step.parts_us.values())) and step.bound == "weights"
    assert step.parts_us["launches"] == 40 * 14 * 2.0, "five more are beside the model"
    in_order = offload_step(server, replace(h100, in_order=True), 32)
    assert in_order.parts_us["launches"] == 40 * 19 * 2.0
    full = stock_step(server, h100, 3)
    assert full.parts_us["attention"] == pytest.approx(3 * 65536 * 163840 / rate)


def test_the_step_waits_for_a_worker_that_is_slower_than_a_layer(model):
    plan = plan_of(model())
    fast = Device(1000, 1e15, link_gb_s=1e6, host_gb_s=1e9, memory_bytes=1, launch_us=0.0)
    slow = replace(fast, host_gb_s=1)
    quick, late = (offload_step(plan.server, device, 8) for device in (fast, slow))
    assert quick.parts_us["wait"] == 0.0 and late.bound == "wait"
    worker = MISSING_SHARE * 8 * 2048 * 163840 / (1e3 * 0.8)
    first = worker / 40 - late.parts_us["attention"] / 40
    rest = 39 * (worker - quick.us) / 40
    assert late.parts_us["wait"] == pytest.approx(first + rest)


def test_what_runs_beside_may_be_the_longest():
    step = Step(2, {"weights": 1.0, "attention": 2.0}, {"copies": 1.0, "boundary": 600.0})
    assert (step.us, step.bound) == (600.0, "boundary")
    assert step.tokens_per_s == pytest.approx(2e6 / 600)


def test_ours_wins_where_the_batch_is_large_enough(model):
    low, high = predict(plan_of(model()), DEVICES["h100"])
    assert low.stock == high.stock and low.offload.us > high.offload.us
    assert low.wins_from and high.wins_from and low.wins_from > high.wins_from
    for found in low, high:
        assert found.stock.batch == 4 and found.offload.batch > 20
        assert found.speed_up and found.speed_up > 3
        assert found.wins_from and 1 < found.wins_from < found.offload.batch
        assert found.wins_host_bytes == (found.wins_from * 2048 + 1) * 32 * 163840


def test_fed_with_the_papers_hardware_the_low_end_gives_what_the_paper_measured(model):
    """The batch at 64k is not published: 32, the pages of the 64 requests of 32k that are."""
    paper = DEVICES["paper"]
    gpu = {"gpu_gib": paper.memory_bytes / 2**30, "host_gib": 400, "config": '{"paper": true}'}
    long, short = (
        plan_of(model(), context_tokens=context, requests=requests, **gpu)
        for context, requests in ((65536, 32), (32768, 64))
    )
    low, high = predict(long, paper)
    assert low.stock.batch == 4 and low.speed_up == pytest.approx(5.1, rel=0.05)
    assert f"gives {high.speed_up:.1f} times stock" in CAVEAT
    device = low_end(paper)
    steps = (offload_step(short.server, device, batch, 0.12) for batch in (16, 32, 64))
    rates = [step.tokens_per_s for step in steps]
    assert rates[1] / rates[0] == pytest.approx(1.78, rel=0.03)
    assert rates[2] / rates[1] == pytest.approx(1.48, rel=0.03)
    shorter = predict(short, paper)[0]
    assert shorter.speed_up and shorter.speed_up < 5.1, "the most that they state, at 64k"


@pytest.mark.parametrize("context, batch", [(1024, 1), (2048, 8), (4096, 4), (8192, 1)])
def test_where_all_pages_fit_the_device_a_step_is_within_one_percent_of_stocks(
    model, context, batch
):
    plan = plan_of(model(), context_tokens=context, requests=batch, budget_tokens=None)
    low, high = predict(plan, DEVICES["h100"])
    ours = high.offload
    assert low == high, "the low end is slower by what the worker's share costs"
    assert not {"look-ahead", "wait", "copies"} & {*ours.parts_us, *ours.beside_us}
    assert ours.us <= 1.01 * stock_step(plan.server, DEVICES["h100"], batch).us


def test_the_command_prints_both_steps(model, tmp_path, capsys):
    asked = ["plan", "--model-path", str(model()), "--context", "65536"]
    asked += ["--host-gb", "256", "--gpu"]
    assert main([*asked, "h100"]) == 0
    out = capsys.readouterr().out
    assert "A decode step, predicted (not measured)" in out and CAVEAT in " ".join(out.split())
    low, _ = predict(plan_of(model(), host_gib=256), DEVICES["h100"])
    parts = {**low.offload.parts_us, **low.offload.beside_us}
    assert parts.keys() == TERMS.keys() and all(f"\n    {x}  " in out for x in TERMS)
    own = asdict(DEVICES["a100"]) | {"link_gb_s": 12, "host_gb_s": 40}
    (tmp_path / "own.json").write_text(json.dumps(own))
    assert main([*asked, str(tmp_path / "own.json"), "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    assert step["low"]["us"] > step["high"]["us"] > 0 < step["stock"]["us"]
    assert 0 < step["low"]["speed_up"] < step["high"]["speed_up"] and step["note"] == CAVEAT


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("H100", "h100"),
        ("h100 sxm", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("rtx_pro_6000", "rtx-pro-6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
    ],
)
def test_names_as_people_and_the_driver_write_them(name, known):
    assert find_device(name) is DEVICES[known]


def test_rates_are_of_one_direction_and_dense():
    """Of PCIe 4 and 5, and without the data sheets' sparsity."""
    for name, device in DEVICES.items():
        assert device.link_gb_s in (32, 64) or name == "gh200"
        assert 100 < device.flop_s / device.memory_gb_s / 1e9 < 430, name
    assert "x86-64" in DEVICES["gh200"].note


def test_every_published_prediction_says_what_it_is():
    rows = read_rows(RESULTS / "predictions.jsonl")
    assert {row["note"] for row in rows} == {CAVEAT}
    assert CAVEAT in " ".join(draw_predictions(rows).get_suptitle().split())
    page = (RESULTS / "predictions.md").read_text()
    page = re.sub(r"\[(.*?)\]\(.*?\)|\*\*", r"\1", page)  # without links and bold type
    assert CAVEAT in " ".join(page.split())


def test_steps_of_the_cpu_device_are_as_the_model_says():
    """Rates and steps are from one run, without fitting; the wait for the worker is not included."""
    rows = [row for row in read_rows(RESULTS / "step_model.jsonl") if row["status"] == "ok"]
    assert len(rows) >= 8
    for row in rows:
        work = SimpleNamespace(**row["work"])  # the sizes of a server by other names
        work.num_layers, work.read_bytes, work.value_bytes = work.layers, work.weight_bytes, 4
        work.bytes_a_token, work.query_parameters = 4 * work.parameters, work.ahead_parameters
        work.expert_bytes, work.expert_share = 0, 1
        work.num_q_heads, work.head_dim, work.model = work.query_values, 1, work
        work.digest_bytes_per_request = work.digest_bytes
        step = offload_step(work, Device(**row["device"]), row["batch"], row["missing_share"])
        step.parts_us["wait"] = 0.0
        sizes = row["batch"], row["context"], row["budget"]
        assert step.us == pytest.approx(row["median_us"], rel=TOLERANCE), sizes
