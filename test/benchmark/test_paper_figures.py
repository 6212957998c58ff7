"""The paper's figures as the step model predicts them."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmark import rows
from benchmark.decode import paper_figures as figures
from sglang_scout.cli.step_model import offload_step

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
KV = 2 * 40 * 8 * 128 * 2  # bytes of a token of Qwen3-14B


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return figures.settings(tmp_path_factory.mktemp("models"))


def test_the_other_systems_by_hand(settings):
    device = replace(figures.PAPER, launch_us=0.0, reached={"": 1.0})
    server = settings["high end"].plans[32768].server
    step = figures.hgca(server, device, 32)
    window, worker = 32 * 8192 * KV / 1900e3, 32 * 2048 * KV / 100e3
    assert step.parts_us["attention"] == pytest.approx(window)
    assert step.parts_us["wait"] == pytest.approx(worker - window)
    step = figures.infinigen(server, device, 32)
    assert step.parts_us["attention"] == pytest.approx(32 * 2048 * KV / 1900e3)
    assert step.us == pytest.approx(0.15 * 32 * 2048 * KV / 15e3), "as long as what it fetches"
    step = figures.in_turn(server, device, 32, 0.33)
    assert step.parts_us["wait"] == pytest.approx(0.33 * worker - 0.67 * worker / 19)


def test_what_holds_under_every_assumption(settings):
    for setting in settings.values():
        for system in figures.ASSUMES:
            over = [setting.over_full(system, context) for context in figures.CONTEXTS]
            assert over == sorted(over), "longer requests gain more"
        server, device, share = setting.plans[32768].server, *setting.assumed[::2]
        assert setting.step("ScoutAttention", 32768, 40) == offload_step(server, device, 40, share)
        assert all(setting.ablation(share)[0] > 1 for share in (0.15, 0.33))
        assert all(0 <= setting.idle_percent(system) < 100 for system in figures.ASSUMES)


def test_rows_and_page_are_what_the_model_says(settings):
    writer = rows.Writer(None, rows.environment("paper_figures"))
    figures.add_rows(writer, settings)
    found, same = rows.read_rows(RESULTS / "paper_figures.jsonl"), ("over_full", "paper", "model")
    for row, made in zip(found, writer.rows, strict=True):
        assert [row.get(name) for name in same] == [made.get(name) for name in same]
    assert figures.table(found) in (RESULTS / "predictions.md").read_text()
