"""The step log: one line per step, consistent with the counters."""

import numpy as np
import pytest
import torch

from mini_worker import SIZE
from page_weights import identity
from sglang_scout.core.profile import StepLog, ratios_by_age, read_step_log

SIZES = {"layers": 3, "budget_tokens": 128, "page_size_tokens": SIZE}
FACTS = {"policy": "scout", "recall": "fixed", "model": "m", "selection": {}, **SIZES}
RECALLS = ("recalled_pages", "recall_bytes", "recall_wait_us")


@pytest.fixture
def logged(make, tmp_path):
    """``logged(path, ...)``: a worker that writes its steps."""

    def build(path=tmp_path / "steps.jsonl", **kwargs):
        facts = FACTS | {"identity": identity(3, 4, 2, 64)}
        return make(verify=False, step_log=StepLog(str(path), facts), **kwargs)

    return build


def test_lines_are_what_was_counted(logged, tmp_path):
    mini = logged(config='{"recall": "fixed", "recall_interval": 2}')
    mini.admit(20 * SIZE)
    cosines = []
    for step in range(11):  # the selections of the last two are not known at the end
        if step == 4:
            mini.admit(11 * SIZE + 5)
        recalled = {name: getattr(mini.engine.parts.counters, name) for name in RECALLS}
        mini.step(extra_rows=1)  # a padding row
        real, row = mini.queries[1], slice(len(mini.requests))
        ahead = mini.project(1, mini.hidden[0, row])
        cosines.append(torch.cosine_similarity(real[row], ahead, dim=-1).mean().item())
    log = read_step_log(tmp_path / "steps.jsonl")  # while the engine still runs
    assert log.facts.layers == 3 and log.budget_pages == 4
    assert [s.step for s in log.steps] == list(range(1, 10))
    assert [s.ages for s in log.steps[3:6]] == [[3], [4, 0], [5, 1]]
    assert log.steps[4].full_pages == [20, 11]
    counters = mini.engine.parts.counters
    by_layer = np.array([[sum(rows) for rows in s.cpu_pages] for s in log.steps])
    assert by_layer.sum(axis=0).tolist() == counters.cpu_pages_by_layer.tolist()
    assert counters.cpu_pages > 0 and counters.recalled_pages > 0
    for name in RECALLS:  # those of the last boundary came after the last line
        assert sum(getattr(s, name) for s in log.steps) == recalled[name]
    waits = np.array([s.gpu_wait_us for s in log.steps]).sum(axis=0)
    assert waits.tolist() == counters.gpu_wait_us_by_layer.tolist()
    for s, cosine in zip(log.steps, cosines, strict=False):
        # Layer 0 uses its own input; first steps of requests are predicted like any other.
        assert s.query_cosine[:2] == pytest.approx([1, cosine], abs=1e-4)
    for before, after in zip(log.steps, log.steps[1:], strict=False):
        assert before.start_us + before.step_us <= after.start_us

    ratios, rows = ratios_by_age(log)
    assert rows.tolist() == [2] * 5 + [1] * 4
    budget = 4 * rows.sum()
    mean = (ratios * rows).sum(axis=1) / rows.sum()
    assert np.allclose(mean, counters.cpu_pages_by_layer / budget)


def test_without_a_log_a_step_compares_queries_when_asked(make):
    mini = make(verify=False)
    mini.admit(20 * SIZE)
    counters, found = mini.engine.parts.counters, []
    for step in range(6):
        mini.engine.compare_next = step == 1
        mini.step()
        if step == 1:
            ahead = mini.project(1, mini.hidden[0, :1])
            cosine = torch.cosine_similarity(mini.queries[1][:1], ahead, dim=-1).mean().item()
        found.append(counters.query_cosine_by_layer[1].item())
    assert np.isnan(found[:3]).all()  # known two steps later
    assert found[3:] == pytest.approx([cosine] * 3, abs=1e-5)


def test_a_full_disk_ends_the_log_and_nothing_else(logged, caplog):
    worker = logged("/dev/full")
    worker.run(4, 20 * SIZE)
    assert caplog.text.count("no more steps are written") == 1


@pytest.mark.sparda
def test_a_forecast_is_no_query_to_compare_with_the_real_one(logged, tmp_path):
    worker = logged(policy="sparda", config='{"forecast_file": "w.npz"}')
    worker.run(4, 20 * SIZE)
    steps = read_step_log(tmp_path / "steps.jsonl").steps
    assert [s.query_cosine for s in steps] == [[None] * 3] * 2
