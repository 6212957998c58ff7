"""Recall profiles: choice of intervals, the file, refusals, and the command."""

import json
from dataclasses import replace

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from sglang_scout.cli import main
from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.profile import (
    FLAG,
    ModelIdentity,
    RecallProfile,
    check_profile,
    choose_interval,
    config_digest,
    load_profile,
    save_profile,
    selection_of,
    smooth,
)
from sglang_scout.core.step_log import FORMAT, VERSION, ratios_by_age, read_step_log

BETA = 0.12
IDENTITY = ModelIdentity("Qwen3ForCausalLM", 2, 4, 2, 64, "0123456789abcdef")
CONFIG = OffloadConfig(policy="scout", budget_tokens=128)
SERVER = dict(num_layers=2, config=CONFIG, model="/models/m", identity=IDENTITY)


def interval(*ratios, samples=None):
    curve = np.array(ratios)
    return choose_interval(curve, np.ones(len(curve)) if samples is None else samples, BETA)


# -- the choice ------------------------------------------------------------------------------------


def test_the_last_step_at_the_threshold():
    assert interval(0.02, 0.05, 0.12, 0.13, 0.2) == 3


def test_never_above_is_the_measured_length_and_above_at_once_is_every_step():
    assert interval(*[0.01] * 40) == 40
    assert interval(0.4, 0.5, 0.6) == interval(0.121) == interval(0.12) == 1


def test_one_odd_step_neither_ends_an_interval_nor_makes_it_longer():
    line = np.arange(1, 41) * 0.005
    assert interval(*line) == 24
    high, low = line.copy(), line.copy()
    high[9], low[26] = 0.3, 0.0
    assert interval(*high) == 24
    assert 24 <= interval(*low) < 32


def test_what_falls_again_later_does_not_count():
    hump = np.concatenate([np.arange(1, 11) * 0.03, np.full(200, 0.0)])
    assert interval(*hump) == 4
    assert interval(*np.linspace(0.3, 0.0, 200)) == 1


def test_many_requests_outvote_one():
    few = [0.05, 0.05, 0.3, 0.05, 0.05, 0.05, 0.05]
    assert interval(*few, samples=np.array([8.0, 8, 1, 8, 8, 8, 8])) == 7
    assert interval(*few, samples=np.array([1.0, 1, 8, 1, 1, 1, 1])) < 3


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 1), st.integers(1, 9))
def test_lines_stay_and_the_choice_grows_with_the_threshold(ratios, threshold, requests):
    samples = np.full(len(ratios), float(requests))
    line = 0.1 + 0.01 * np.arange(len(ratios))
    assert np.allclose(smooth(line, samples), line)
    found = interval(*ratios, samples=samples)
    assert 1 <= found <= len(ratios)
    curve = np.array(ratios)
    choices = [choose_interval(curve, samples, x) for x in (threshold, min(1.0, threshold + 0.1))]
    assert choices[0] <= choices[1]


# -- the file --------------------------------------------------------------------------------------


def a_profile(**changes):
    values = dict(
        version=1, model="m", page_size_tokens=32, budget_tokens=128, threshold=BETA,
        intervals=[3, 40], num_layers=2, workload="4 requests", identity=IDENTITY,
        samples=[4] * 40, curves=[[0.1] * 3 + [0.5] * 37, [0.01] * 40], made_by="this test",
        selection=selection_of(CONFIG),
    )  # fmt: skip
    return RecallProfile(**(values | changes))


def test_round_trip(tmp_path):
    path = str(tmp_path / "p.json")
    save_profile(a_profile(), path)
    assert load_profile(path) == a_profile()
    assert len((tmp_path / "p.json").read_text().splitlines()) == len(a_profile().__struct_fields__)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"num_layers": 3}, ["2 layers", "has 3"]),
        ({"config": replace(CONFIG, page_size_tokens=64)}, ["pages of 32", "64"]),
        (
            {"config": replace(CONFIG, budget_tokens=256)},
            ["budget of 128", "--kv-offload-budget 256", "set that to 128"],
        ),
        (
            {"config": replace(CONFIG, digest="minmax")},
            ["digest", "'minmax'", "--kv-offload-config"],
        ),
        ({"identity": msgspec.structs.replace(IDENTITY, architecture="Llama")}, ["Llama"]),
        ({"identity": msgspec.structs.replace(IDENTITY, config_digest="fedc")}, ["fedc"]),
    ],
)
def test_a_profile_of_something_else_is_refused_by_name(change, parts):
    check_profile(a_profile(), "p.json", **SERVER)
    check_profile(a_profile(identity=None, selection={}), "p.json", **SERVER)
    with pytest.raises(ValueError, match=FLAG) as caught:
        check_profile(a_profile(), "p.json", **(SERVER | change))
    for part in ["'p.json'", *parts, "sglang-scout profile"]:
        assert part in str(caught.value)


def test_the_digest_is_of_the_model_and_not_of_the_file():
    config = {"hidden_size": 64, "num_hidden_layers": 2, "transformers_version": "5"}
    other = {"num_hidden_layers": 2, "_name_or_path": "/x", "hidden_size": 64}
    assert config_digest(config) == config_digest(other)
    assert config_digest(config) != config_digest(config | {"hidden_size": 128})


# -- from a step log -------------------------------------------------------------------------------


def write_log(path, steps, *, full_pages=(8, 8), growth=(0.02, 0.3), **changes):
    """A server's log: the ratio of layer l grows by growth[l] a step from its second step on."""
    facts = {"format": FORMAT, "version": VERSION, "policy": "scout", "recall": "off", "model": "m",
             "layers": 2, "budget_tokens": 128, "page_size_tokens": 32,
             "identity": msgspec.to_builtins(IDENTITY), "selection": selection_of(CONFIG)}  # fmt: skip
    lines = [facts | changes]
    for age in range(steps):
        missed = [[min(4, round(4 * g * age)) if age else 4] * len(full_pages) for g in growth]
        lines.append(
            {"step": age + 1, "start_us": 1000 * age, "step_us": 900, "ages": [age] * len(full_pages),
             "full_pages": list(full_pages), "cpu_pages": missed, "gpu_wait_us": [1, 2],
             "recalled_pages": 3, "recall_bytes": 3000, "recall_wait_us": 10,
             "query_cosine": [None, 0.5 if age else None]}
        )  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_ratios_by_age(tmp_path):
    log = read_step_log(write_log(tmp_path / "s.jsonl", 5, full_pages=(8, 4)))
    ratios, rows = ratios_by_age(log, 7)
    assert rows.tolist() == [1, 1, 1, 1, 1, 0, 0], "the second request fits its budget"
    assert ratios[1].tolist() == [1, 0.25, 0.5, 1, 1, 0, 0]


def test_a_line_under_way_is_left_out_and_rubbish_is_refused(tmp_path):
    path = write_log(tmp_path / "s.jsonl", 5)
    path.write_bytes(path.read_bytes() + b'{"step": 6')
    assert len(read_step_log(path).steps) == 5
    old = {"format": FORMAT, "version": VERSION - 1}
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
        ({}, ["--output", "s.jsonl"], ["--output 's.jsonl'", "STEP_LOG names the same file"]),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, capsys, log, arguments, parts):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "s.jsonl", **({"steps": 41} | log))
    assert main(["profile", "s.jsonl", "--output", "p.json", *arguments]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts), error


# -- the report ------------------------------------------------------------------------------------


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
