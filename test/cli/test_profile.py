"""Recall profiles: how intervals are chosen, the file, what is refused, and the command around them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from sglang_scout.cli import main, profile, profile_plot
from sglang_scout.cli.profile import as_text, profile_of
from sglang_scout.cli.profile_prompts import make_prompts
from sglang_scout.cli.profile_request import Request, check_request
from sglang_scout.cli.profile_run import RunFailed
from sglang_scout.cli.step_log_file import ratios_by_age, read_step_log
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


def test_never_above_is_the_measured_length():
    assert interval(*[0.01] * 40) == 40


def test_above_at_once_recalls_in_every_step():
    assert interval(0.4, 0.5, 0.6) == 1
    assert interval(0.121) == interval(0.12) == 1


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


def test_noise_moves_the_choice_little():
    rng = np.random.default_rng(0)
    clean = 0.2 * (1 - np.exp(-np.arange(1, 129) / 20))
    assert interval(*clean) == 18
    noisy = [interval(*(clean + rng.normal(0, 0.015, 128))) for _ in range(200)]
    assert abs(np.mean(noisy) - 18) < 3 and min(noisy) > 9 and max(noisy) < 27


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
    for written in (
        a_profile(),
        a_profile(check=profile.ProfileCheck([0.1, 0.0], [[0.1] * 40, [0.0] * 40])),
    ):
        save_profile(written, path)
        assert load_profile(path) == written
    assert len((tmp_path / "p.json").read_text().splitlines()) == len(written.__struct_fields__)


def test_the_profile_of_this_server_is_taken():
    check_profile(a_profile(), "p.json", **SERVER)
    check_profile(a_profile(identity=None, selection={}), "p.json", **SERVER)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"num_layers": 3}, ["2 layers", "has 3"]),
        ({"config": replace(CONFIG, page_size_tokens=64)}, ["pages of 32", "64"]),
        (
            {"config": replace(CONFIG, budget_tokens=256)},
            ["budget of 128", "--kv-offload-budget 256", "set that to 128"],
        ),
        *(
            ({"config": replace(CONFIG, **{key: value})}, [key, repr(value), "--kv-offload-config"])
            for key, value in (
                ("digest", "signs"),
                ("head_reduce", "max"),
                ("resident_bonus", 1.0),
                ("sink_pages", 0),
                ("recent_pages", 3),
            )
        ),
        *(
            ({"identity": msgspec.structs.replace(IDENTITY, **{field: value})}, [str(value)])
            for field, value in (
                ("architecture", "LlamaForCausalLM"),
                ("num_q_heads", 8),
                ("num_kv_heads", 4),
                ("head_dim", 128),
                ("config_digest", "fedcba9876543210"),
            )
        ),
    ],
)
def test_a_profile_of_something_else_is_refused_by_name(change, parts):
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


def write_log(path, steps, *, layers=2, full_pages=(8, 8), growth=(0.02, 0.3)):
    """A server's log: the ratio of layer l grows by growth[l] a step from its second step on."""
    facts = {"format": "sglang-scout-steps", "version": 1, "layers": layers, "budget_tokens": 128,
             "page_size_tokens": 32, "identity": msgspec.to_builtins(IDENTITY)}  # fmt: skip
    lines = [facts]
    for age in range(steps):
        missed = [[min(4, round(4 * g * age)) if age else 4] * len(full_pages) for g in growth]
        lines.append(
            {"step": age + 1, "start_us": 1000 * age, "step_us": 900, "ages": [age, age],
             "full_pages": list(full_pages), "cpu_pages": missed, "gpu_wait_us": [1, 2],
             "recalled_pages": 0, "recall_bytes": 0, "recall_wait_us": 0}
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
    for text in ("", "x\n", "[]\n", '{"format": "sglang-scout-trace", "version": 1}\n'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="s.jsonl"):
            read_step_log(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_step_log(tmp_path / "absent")


def request(**changes):
    return Request(
        **({"model_path": "/models/m", "output": "p.json", "budget_tokens": 128} | changes)
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"resident_tokens": 512},
            "resident_tokens is set by the command itself.*--resident-tokens",
        ),
        ({"recall": "off"}, "recall is set by the command itself; leave it out$"),
        ({"digest": "sings"}, "digest = 'sings'; choose one of minmax, signs"),
        ({"recent_pages": 4}, "budget 128: holds 4 pages, fewer than sink_pages .* = 5"),
    ],
)
def test_keys_that_cannot_be_passed_on(config, message):
    with pytest.raises(ConfigError, match=message):
        check_request(request(config=config))


def test_profile_of_a_log(tmp_path):
    log = read_step_log(write_log(tmp_path / "s.jsonl", 41))
    found = profile_of(log, request(steps=40), [300, 320])
    # round(4 * 0.02 * age) is 0 up to age 6, then one page of four, 0.25.
    assert found.intervals == [6, 1]
    assert found.samples == [2] * 40 and len(found.curves[0]) == 40
    assert found.identity == IDENTITY and "300 to 320" in found.workload
    text = as_text(found)
    assert "in every step" in text and "[1]" in text and "Mean interval 3.5" in text
    profile_plot.draw(found, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_a_profile_says_what_selected_its_pages(tmp_path):
    log = read_step_log(write_log(tmp_path / "s.jsonl", 41))
    keys = {"digest": "signs", "resident_bonus": 1.0, "recent_pages": 2}
    found = profile_of(log, request(steps=40, config=keys), [300])
    assert found.selection == keys | {"head_reduce": "mass", "sink_pages": 1}


def test_a_log_that_ends_early_makes_no_profile(tmp_path):
    log = read_step_log(write_log(tmp_path / "s.jsonl", 20))
    with pytest.raises(RunFailed, match="step 20 of 40"):
        profile_of(log, request(steps=40), [300])


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 256,
              "num_attention_heads": 4, "max_position_embeddings": 4096}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"budget_tokens": 100}, ["profile: --budget 100", "multiple of the page size (32"]),
        ({"budget_tokens": 32}, ["profile: --budget 32", "at least 64"]),
        ({"threshold": 0.0}, ["--threshold 0.0"]),
        ({"threshold": float("nan")}, ["--threshold nan"]),
        ({"steps": 4}, ["--steps 4", "at least 8"]),
        ({"batch": 0}, ["--batch 0"]),
        ({"resident_tokens": 100}, ["--resident-tokens 100", "multiple of 32"]),
        ({"input_tokens": 128}, ["--input-len 128", "budget of 128", "at least 192"]),
        ({"input_tokens": 4000}, ["--input-len 4000", "--steps 256", "4096 tokens", "lower"]),
        ({"output": "/no/such/folder/p.json"}, ["--output '/no/such/folder/p.json'", "name a"]),
        ({"output": "/"}, ["--output '/'", "name a file"]),
        ({"output": ""}, ["--output ''", "name a file"]),
        ({"output": "/proc/p.json"}, ["--output '/proc/p.json'", "cannot be written", "another"]),
        ({"plot": "/no/such/folder/p.png"}, ["--plot '/no/such/folder/p.png'", "name a file"]),
        ({"plot": "/proc/p.png"}, ["--plot '/proc/p.png'", "cannot be written"]),
        ({"plot": "p.gif"}, ["--plot 'p.gif'", ".png"]),
        ({"server_args": "'x"}, ['--server-args "\'x"', "No closing quotation"]),
        ({"server_args": "--mem 1 --port=5"}, ["--server-args: --port is set by the command"]),
        ({"server_args": "--kv-offload-budget 64"}, ["--kv-offload-budget is set by", "leave"]),
        ({"server_args": "--max-running-requests 2"}, ["--max-running-requests is", "--batch"]),
        ({"config": {"exact_layers": [2]}}, ["profile: --config: exact_layers", "layers 0 to 1"]),
        ({"config": {"trace": "/proc/t"}}, ["profile: --config: trace = '/proc/t'", "written"]),
        ({"output": "p.png", "plot": "./p.png"}, ["--plot './p.png'", "the file of --output too"]),
        (
            {"output": "t", "config": {"trace": "t"}},
            ["--output 't'", "the file of trace too; name"],
        ),
        (
            {"plot": "t.png", "config": {"quality": "t.png"}},
            ["--plot 't.png'", "file of quality too"],
        ),
        (
            {"output": "d.txt", "dataset": "d.txt"},
            ["--output 'd.txt'", "the file of --dataset too"],
        ),
        ({"dataset": "d", "config": {"trace": "d"}}, ["--config: trace = 'd'", "of --dataset too"]),
        ({"config": {"foo": 1}}, ["profile: --config: unknown key 'foo'"]),
        ({"model_path": "/no/such/model"}, ["profile: --model-path /no/such/model"]),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(model, change, parts):
    values = {"model_path": str(model), "input_tokens": 1024} | change
    with pytest.raises(ConfigError) as caught:
        check_request(request(**values))
    for part in parts:
        assert part in str(caught.value)


def test_right_arguments_are_not(model, tmp_path):
    output = tmp_path / "p.json"
    values = {"model_path": str(model), "input_tokens": 1024, "output": str(output)}
    check_request(request(**values, plot=str(tmp_path / "p.png"), server_args="--a 'b c'"))
    assert not output.exists()
    output.write_text("of an earlier run")
    check_request(request(**values))
    assert output.read_text() == "of an earlier run"


def test_prompts_of_a_text_file_of_lines_and_of_nothing(model, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("abcdefghij" * 100)
    wanted = dict(count=3, length_tokens=300, least_tokens=192)
    prompts = make_prompts(str(model), str(text), **wanted)
    assert [len(p) for p in prompts] == [300] * 3 and prompts[0] != prompts[1][1:]

    lines = tmp_path / "prompts.jsonl"
    entries = [{"prompt": "x" * 10}, {"text": "y" * 400}, {"input_ids": list(range(200))}]
    lines.write_text("\n".join(map(json.dumps, [*entries, {"prompt": "z" * 250}])))
    prompts = make_prompts(str(model), str(lines), **wanted)
    assert [len(p) for p in prompts] == [300, 200, 250]

    assert [len(p) for p in make_prompts(str(model), None, **wanted)] == [300] * 3


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.txt", "too little", "10 tokens, 3 prompts of more than the budget need 576"),
        ("a.jsonl", '{"prompt": "short"}', "0 prompts of at least 192 tokens (1 are shorter)"),
        ("a.jsonl", "{", "line 1 is no JSON"),
        ("a.jsonl", "[1]", "line 1 is no object"),
        ("a.jsonl", '\n{"question": "?"}', "line 2 has no prompt"),
        ("a.jsonl", '{"input_ids": [1, "2"]}', "line 1 has no prompt"),
    ],
)
def test_unusable_datasets(model, tmp_path, name, text, part):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path))) as caught:
        make_prompts(str(model), str(path), count=3, length_tokens=300, least_tokens=192)
    assert part in str(caught.value)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read it"):
        make_prompts(str(model), str(path), count=3, length_tokens=300, least_tokens=192)


def test_a_model_without_a_tokenizer_takes_ids_only(model, tmp_path):
    (model / "tokenizer.json").unlink()
    wanted = dict(count=1, length_tokens=300, least_tokens=192)
    with pytest.raises(ConfigError, match="input_ids"):
        make_prompts(str(model), None, **wanted)
    lines = tmp_path / "ids.jsonl"
    lines.write_text(json.dumps({"input_ids": list(range(200))}))
    assert len(make_prompts(str(model), str(lines), **wanted)[0]) == 200


def arguments(model, tmp_path, *more):
    return ["profile", "--model-path", str(model), "--output", str(tmp_path / "p.json"),
            "--budget", "128", "--input-len", "512", "--batch", "2", "--steps", "40",
            "--device", "cpu", *more]  # fmt: skip


def test_the_command(model, tmp_path, monkeypatch, capsys):
    """The servers are replaced by the log of a run; all else is real."""
    runs = []

    def run_workload(model_path, prompts, steps, **kwargs):
        assert kwargs["config"]["sink_pages"] == 2
        assert kwargs["config"]["quality_inputs"] == 9
        named = [kwargs["config"][key] for key in ("trace", "quality")]
        assert all(Path(name).parent.is_dir() for name in named)
        runs.append((kwargs["config"]["recall"], kwargs["decode_flags"], named))
        assert kwargs["config"]["resident_tokens"] == 256 and kwargs["where"].decode == "cpu"
        assert kwargs["server_args"] == ["--log-level", "a b"]
        assert [len(p) for p in prompts] == [512, 512] and steps == 40
        growth = (0.02, 0.3) if kwargs["config"]["recall"] == "off" else (0.0, 0.02)
        return read_step_log(write_log(tmp_path / "s.jsonl", 41, growth=growth))

    monkeypatch.setattr(profile, "run_workload", run_workload)
    written = [str(tmp_path / "trace.json"), str(tmp_path / "quality.jsonl")]
    keys = {"sink_pages": 2, "trace": written[0], "quality": written[1], "quality_inputs": 9}
    more = [
        "--server-args",
        "--log-level 'a b'",
        "--config",
        json.dumps(keys),
    ]
    plot = ["--json", "--plot", str(tmp_path / "p.png")]
    assert main(arguments(model, tmp_path, *more, *plot)) == 0
    printed = json.loads(capsys.readouterr().out)
    found = load_profile(str(tmp_path / "p.json"))
    assert msgspec.to_builtins(found) == printed
    assert found.intervals == [6, 1] and found.check is not None and found.check.ratios[0] == 0.0
    path = str(tmp_path / "p.json")
    assert [run[:2] for run in runs] == [("off", ()), ("profile", (FLAG, path))]
    assert runs[0][2] == written and not {*written} & {*runs[1][2]}  # not written over
    assert (tmp_path / "p.png").exists()

    assert main(arguments(model, tmp_path, *more, "--no-check")) == 0
    assert "Mean interval 3.5" in capsys.readouterr().out and len(runs) == 3


def test_failures_and_ctrl_c_have_exit_codes(model, tmp_path, monkeypatch, capsys):
    for error, code, text in (
        (RunFailed("profile: the decode server ended"), 1, "the decode server ended"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ):

        def run_workload(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(profile, "run_workload", run_workload)
        assert main(arguments(model, tmp_path)) == code
        assert text in capsys.readouterr().err
    assert main(arguments(model, tmp_path, "--threshold", "2")) == 2
    assert "--threshold 2.0" in capsys.readouterr().err
