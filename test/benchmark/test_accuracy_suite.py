"""The accuracy suite without servers: flags, resuming, scores and the gate's verdict."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from benchmark.accuracy import gate, policies, scoring, suite, tasks, vocabulary
from benchmark.accuracy.policies import FULL, Setting
from benchmark.progress import Progress
from benchmark.rows import RowFile, environment
from sglang_scout.core.flags import parse_config
from sglang_scout.policy import policies as known_policies

FULL_SETTING, SCOUT = Setting(FULL), Setting("scout", 512)


class Answering:
    """Servers that know all answers, except where ``fails(setting, index)``."""

    def __init__(self, args, fails):
        self.fails, self.asked = fails, []
        self.answers = {
            tuple(sample.prompt): (i, sample.answer)
            for length in args.lengths
            for task in args.tasks
            for i in range(args.samples)
            for sample in [tasks.make_sample(task, length, args.seed + i)]
        }

    def ask(self, setting, payload):
        words = payload["sampling_params"]["ebnf"].split("\n")[0].split()[1:-1]
        forced = [int(word.strip("<[]>")) for word in words]
        index, answer = self.answers[(*payload["input_ids"], *forced)]
        self.asked.append((setting, index))
        given = [vocabulary.ID_OF["0"]] if self.fails(setting, index) else answer
        return {"output_ids": forced + given, "meta_info": {"finish_reason": {"type": "stop"}}}

    def counters(self, setting):
        if setting.policy == FULL:
            return {}
        # One page of four was the CPU's, except that the first 8 of 16 were all: a start that must not count.
        steps = sum(1 for s, _ in self.asked if s == setting)
        return {"steps": steps, "cpu_pages": 8 + 4 * steps, "budget_pages": 16 + 16 * steps}


def row_file(path, **fields):
    known = {"model": "m", "weights": "w", "dtype": "d", "seed": 7, "through": "decode"}
    return RowFile(path, environment("accuracy"), known | {"config": {}, "untimed": True} | fields)


def measured_rows(path, fails, settings=(FULL_SETTING, SCOUT)):
    sizes = {"lengths": [128, 160], "tasks": ["recall", "count"], "samples": 5}
    args = argparse.Namespace(**sizes, seed=7, questions="tasks", through="decode")
    file, server = row_file(path), Answering(args, fails)
    suite.measure(server, settings, args, file, Progress())
    return file, server


@pytest.mark.parametrize("name", ["paper", *policies.NAMES[1:], *policies.SYSTEMS])
@pytest.mark.parametrize("budget", [256, 2048])
def test_the_flags_of_every_policy_are_understood(name, budget):
    """Keys that do not apply to a policy are left out."""
    more = {"resident_tokens": 64, "exact_layers": [1], "step_log": "/tmp/x.jsonl"}
    words = Setting(name, budget).decode_flags(more, "some-model")
    given = dict(zip(words[::2], words[1::2], strict=True))
    parsed = parse_config(
        policy=given["--kv-offload"],
        policies=known_policies(),
        budget_tokens=int(given["--kv-offload-budget"]),
        config=given["--kv-offload-config"],
    )
    assert parsed.policy == (name if name in policies.SYSTEMS else "scout")
    assert parsed.budget_tokens == (budget // 2 if name == "hgca" else budget)
    assert parsed.resident_tokens == 64 and parsed.step_log == "/tmp/x.jsonl"
    if parsed.policy == "scout":
        assert parsed.precompute == (name in ("paper", "scout", "scout-rotated"))
        assert ("exact_layers" in given["--kv-offload-config"]) == parsed.precompute
    assert (parsed.context_cap_tokens == budget // 2) == (name == "hgca")
    assert (
        "context_cap_tokens" not in Setting("hgca+context_cap_tokens=null", 512).decode_flags()[-1]
    )
    if name == "recent":
        assert parsed.sink_pages + parsed.recent_pages == budget // 32


def test_rows_hold_every_outcome_and_are_not_measured_twice(tmp_path):
    path = tmp_path / "rows.jsonl"
    fails = lambda setting, index: setting == SCOUT and index in (1, 4)  # noqa: E731
    file, server = measured_rows(path, fails)
    assert len(file.rows) == 2 * 2 * 2 and len(server.asked) == 8 * 5
    place = 160, "count", "scout"
    names = "length_tokens", "task", "policy"
    [row] = (r for r in file.rows if tuple(r[name] for name in names) == place)
    assert (row["right"], row["asked"], row["outcomes"]) == (3, 5, "10110")
    assert (row["low"], row["high"]) == pytest.approx(scoring.wilson_interval(3, 5), abs=1e-4)
    assert row["cpu_compute_ratio"] == pytest.approx(0.25)
    assert row["offload"] == {"steps": 5, "cpu_pages": 20, "budget_pages": 80}

    # Truncated in the middle: only missing rows are measured again.
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:5]) + "\n")
    again, server = measured_rows(path, fails)
    assert len(server.asked) == 3 * 5
    names += ("outcomes",)
    found, before = (
        sorted(tuple(r[name] for name in names) for r in some)
        for some in (again.rows, map(json.loads, lines))
    )
    assert found == before
    assert not row_file(path, weights="other").rows


def test_paired_losses():
    base, other = [True, True, True, False, False], [False, False, True, True, False]
    loss = scoring.paired_loss(base, other)
    assert (loss.lost, loss.gained, loss.asked, loss.points) == (2, 1, 5, pytest.approx(20))
    for one in (loss, scoring.Loss(100, 0, 0)):
        low, high = one.interval_points
        assert -100 <= low < one.points < high <= 100
    with pytest.raises(ValueError, match="same questions"):
        scoring.paired_loss(base, other[:-1])


@pytest.mark.parametrize(("allowed", "asked"), [(0.3, 168), (1.0, 168), (2.5, 168), (1.0, 2000)])
def test_the_margin_is_exceeded_by_chance_once_in_twenty(allowed, asked):
    margin = scoring.margin_points(allowed, asked)
    lost = np.random.default_rng(0).binomial(asked, allowed / 100, size=200_000)
    assert (100 * lost / asked > margin + 1e-9).mean() <= 0.055
    smaller = margin - 100 / asked
    assert (100 * lost / asked > smaller + 1e-9).mean() > 0.05, "a smaller one would not do"
    assert scoring.margin_points(allowed, 10 * asked) < margin


def test_the_gate_passes_equal_answers_and_fails_a_loss(tmp_path, capsys):
    full = [True] * 160 + [False] * 8
    worse = [False] * 8 + full[8:]
    small, large = Setting("scout", 1024), Setting("scout", 2048)
    verdicts = [gate.judge(small, full, full, 1.2), gate.judge(large, full, worse, 1.2)]
    assert [v.passed for v in verdicts] == [True, False]
    assert gate.judge(large, full, worse, 5.0).passed
    text = gate.report(verdicts)
    assert "FAIL" in text.splitlines()[2] and "pass" in text.splitlines()[1]
    file, _ = measured_rows(tmp_path / "r", lambda setting, index: setting == SCOUT and index == 0)
    loss = scoring.paired_loss(*(gate.outcomes(file.rows, s) for s in (FULL_SETTING, SCOUT)))
    assert (loss.asked, loss.lost, loss.gained) == (20, 4, 0)
