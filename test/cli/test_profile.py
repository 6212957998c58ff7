"""Recall profiles: choice of intervals, the file, refusals, and the command."""

import json
import sys
from dataclasses import replace

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given
from msgspec.structs import replace as change

from sglang_scout.cli import main
from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.profile import (
    FLAG,
    LOG_FORMAT,
    LOG_VERSION,
    ModelIdentity,
    RecallProfile,
    check_profile,
    choose_interval,
    load_profile,
    ratios_by_age,
    read_step_log,
    selection_of,
    smooth,
)

BETA = 0.12
IDENTITY = ModelIdentity("Qwen3ForCausalLM", 2, 4, 2, 64, "0123456789abcdef")
CONFIG = OffloadConfig(policy="scout", budget_tokens=128)
SERVER = dict(config=CONFIG, model="/models/m", identity=IDENTITY)


LINE = [0.005 * n for n in range(1, 41)]
HUMP = [0.03 * n for n in range(1, 11)] + [0.0] * 200
FEW = [0.05, 0.05, 0.3, 0.05, 0.05, 0.05, 0.05]


@pytest.mark.parametrize(
    ("ratios", "samples", "found"),
    [
        ([0.02, 0.05, 0.12, 0.13, 0.2], None, 3),  # the last step at the threshold
        ([0.01] * 40, None, 40),  # never above: the measured length
        ([0.121], None, 1),
        (LINE, None, 24),
        ([*LINE[:9], 0.3, *LINE[10:]], None, 24),  # one odd step does not end an interval
        ([*LINE[:26], 0.0, *LINE[27:]], None, 27),  # nor make it much longer
        (HUMP, None, 4),  # what falls again later does not count
        (FEW, [8, 8, 1, 8, 8, 8, 8], 7),  # many requests outvote one
        (FEW, [1, 1, 8, 1, 1, 1, 1], 1),
    ],
)
def test_the_longest_interval_at_the_threshold(ratios, samples, found):
    weights = np.ones(len(ratios)) if samples is None else np.array(samples, float)
    assert choose_interval(np.array(ratios), weights, BETA) == found


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 1), st.integers(1, 9))
def test_lines_stay_and_the_choice_grows_with_the_threshold(ratios, threshold, requests):
    samples = np.full(len(ratios), float(requests))
    line = 0.1 + 0.01 * np.arange(len(ratios))
    assert np.allclose(smooth(line, samples), line)
    curve = np.array(ratios)
    choices = [choose_interval(curve, samples, x) for x in (threshold, min(1.0, threshold + 0.1))]
    assert 1 <= choices[0] <= choices[1] <= len(ratios)


PROFILE = RecallProfile(
    version=1,
    model="m",
    page_size_tokens=32,
    budget_tokens=128,
    threshold=BETA,
    intervals=[3, 40],
    num_layers=2,
    identity=IDENTITY,
    selection=selection_of(CONFIG),
)


@pytest.mark.parametrize(
    ("server", "parts"),
    [
        ({"identity": change(IDENTITY, num_layers=3)}, ["2 layers", "'/models/m' with 3"]),
        ({"config": replace(CONFIG, page_size_tokens=64)}, ["pages of 32", "64"]),
        ({"config": replace(CONFIG, budget_tokens=256)}, ["--kv-offload-budget 256", "to 128"]),
        ({"config": replace(CONFIG, recall="fixed", recall_threshold=0.1)}, ["0.12", "= 0.1 in"]),
        ({"config": replace(CONFIG, digest="minmax")}, ["'minmax'", "--kv-offload-config"]),
        ({"identity": change(IDENTITY, architecture="Llama")}, ["Llama"]),
        ({"identity": change(IDENTITY, config_digest="fedc")}, ["fedc"]),
    ],
)
def test_a_profile_of_something_else_is_refused_by_name(server, parts):
    check_profile(PROFILE, "p.json", **SERVER)
    adaptive = replace(CONFIG, recall_threshold=0.1)  # takes it as a first estimate
    check_profile(PROFILE, "p.json", **SERVER | {"config": adaptive})
    for selection in ({}, PROFILE.selection | {"mass": 0.9}):  # a key of an earlier release
        check_profile(change(PROFILE, identity=None, selection=selection), "p.json", **SERVER)
    with pytest.raises(ValueError, match=FLAG) as caught:
        check_profile(PROFILE, "p.json", **(SERVER | server))
    for part in ["'p.json'", *parts, "sglang-scout profile"]:
        assert part in str(caught.value)


FACTS = {
    "format": LOG_FORMAT,
    "version": LOG_VERSION,
    "policy": "scout",
    "recall": "off",
    "model": "m",
    "layers": 2,
    "budget_tokens": 128,
    "page_size_tokens": 32,
    "identity": msgspec.to_builtins(IDENTITY),
    "selection": selection_of(CONFIG),
}
STEP = {"step_us": 900, "gpu_wait_us": [1, 2]}
STEP |= {"recalled_pages": 3, "recall_bytes": 3000, "recall_wait_us": 10}


def write_log(path, steps, *, full_pages=(8, 8), growth=(0.02, 0.3), **changes):
    """A server's log: the ratio of layer l grows by growth[l] a step from its second step on."""
    lines, requests = [FACTS | changes], len(full_pages)
    for age in range(steps):
        missed = [[min(4, round(4 * g * age)) if age else 4] * requests for g in growth]
        of_requests = {"ages": [age] * requests, "full_pages": full_pages, "cpu_pages": missed}
        of_step = {"start_us": 1000 * age, "query_cosine": [None, 0.5 if age else None]}
        lines.append(STEP | {"step": age + 1} | of_requests | of_step)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_ratios_by_age(tmp_path):
    log = read_step_log(write_log(tmp_path / "s.jsonl", 5, full_pages=(8, 4)))
    ratios, rows = ratios_by_age(log)
    assert rows.tolist() == [1, 1, 1, 1, 1], "the second request fits its budget"
    assert ratios[1].tolist() == [1, 0.25, 0.5, 1, 1]


def test_a_line_under_way_is_left_out_and_rubbish_is_refused(tmp_path):
    path = write_log(tmp_path / "s.jsonl", 5)
    path.write_bytes(path.read_bytes() + b'{"step": 6')
    assert len(read_step_log(path).steps) == 5
    old = {"format": LOG_FORMAT, "version": LOG_VERSION - 1}
    for text in ("", "x\n", "[]\n", json.dumps(old) + "\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="s.jsonl"):
            read_step_log(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_step_log(tmp_path / "absent")


def test_the_command(tmp_path, capsys):
    log, output = write_log(tmp_path / "s.jsonl", 41), tmp_path / "p.json"
    command = ["profile", str(log), "--output", str(output)]
    assert main([*command, "--json", "--plot", str(tmp_path / "p.png")]) == 0
    found = load_profile(str(output))
    assert msgspec.to_builtins(found) == json.loads(capsys.readouterr().out)
    assert len(output.read_text().splitlines()) == len(found.__struct_fields__)
    # From age 3 on; round(4 * 0.02 * age) is 0 up to age 6, then one page of four, 0.25.
    assert found.intervals == [4, 1] and found.threshold == BETA
    assert found.query_cosine == [None, 0.5]
    assert found.samples == [2] * 38 and len(found.curves[0]) == 38
    assert found.workload == "2 requests of 256 tokens, 38 steps"
    check_profile(found, "p.json", **SERVER)
    assert (tmp_path / "p.png").stat().st_size > 10_000
    assert main(command) == 0
    assert "hard to predict (cosine below 0.8): 1 (0.50)." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("log", "arguments", "parts"),
    [
        ({}, ["--threshold", "2"], ["--threshold 2.0", "between 0 and 1"]),
        ({"recall": "fixed"}, [], ['"recall": "fixed"', '"recall": "off"']),
        ({"steps": 8}, [], ["5 steps", "at least 8", "generate more tokens"]),
        ({"full_pages": (4, 3)}, [], ["0 steps", "budget of 128 tokens", "longer prompts"]),
        ({}, ["--output", "/no/such/p.json"], ["--output '/no/such/p.json'", "name another"]),
        ({}, ["--plot", "/no/such/p.png"], ["--plot '/no/such/p.png'", "a folder that exists"]),
        ({}, ["--plot", "p.what"], ["--plot 'p.what'", ".png, .svg or .pdf"]),
        ({}, ["--output", "s.jsonl"], ["--output 's.jsonl'", "STEP_LOG 's.jsonl' names the"]),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, capsys, log, arguments, parts):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "s.jsonl", **({"steps": 41} | log))
    assert main(["profile", "s.jsonl", "--output", "p.json", *arguments]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts), error


def test_a_plot_needs_an_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    log = str(write_log(tmp_path / "s.jsonl", 41))
    assert main(["profile", log, "--output", str(tmp_path / "p"), "--plot", "p.png"]) == 2
    assert "pip install 'sglang-scout[plot]'" in capsys.readouterr().err


def test_report(tmp_path, capsys):
    path = write_log(tmp_path / "s.jsonl", 5)
    lines = path.read_text().splitlines()
    later = json.loads(lines[1]) | {"step": 6, "start_us": 10**9}
    path.write_text("\n".join([*lines, json.dumps(later)]) + "\n")
    assert main(["report", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 4, "before a step of new requests alone the server may have been idle"
    assert found["period_us"] == 1000 and found["cpu_wait_us"] == 3 and found["rest_us"] == 887
    assert found["recall_wait_us"] == 10 and found["between_us"] == 100
    assert found["ratio_by_layer"] == [0.0, 1.0] and found["cpu_wait_us_by_layer"] == [1, 2]
    write_log(path, 1)
    assert main(["report", str(path)]) == 2
    assert "no two consecutive steps" in capsys.readouterr().err
