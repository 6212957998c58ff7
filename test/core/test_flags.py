"""Every wrong value is refused with the flag, the value and the fix."""

import json
import os

import pytest

from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import check_files, parse_config
from sglang_scout.core.profile import load_profile
from sglang_scout.policy import policies


def parse(**kwargs):
    kwargs.setdefault("policy", "scout")
    return parse_config(policies={"scout": {}, "other": {}}, available_cpus={0, 1}, **kwargs)


DEEP = "[" * 100_000 + "]" * 100_000
REFUSED_FLAGS = [
    ({"policy": "magic"}, ["--kv-offload", "'magic'", "scout"]),
    ({"policy": None}, ["--kv-offload None", "`null`", "'scout'"]),
    ({"budget_tokens": -32}, ["--kv-offload-budget", "-32"]),
    ({"budget_tokens": 1000}, ["--kv-offload-budget", "1000", "992"]),
    ({"budget_tokens": 32}, ["--kv-offload-budget 32: holds 1 page, fewer", "64"]),
    ({"budget_tokens": True}, ["--kv-offload-budget True", "bool", "whole number"]),
    ({"budget_tokens": 32 * 10**400}, ["--kv-offload-budget", f"set it to {2**40}"]),
    ({"host_gb": float("nan")}, ["--kv-offload-host-gb", "nan"]),
    ({"recall_profile": 3}, ["--kv-offload-recall-profile 3", "int", "name of a file"]),
    ({"recall_profile": ""}, ["--kv-offload-recall-profile ''", "length >= 1", "leave it out"]),
    ({"cpus": "0-7"}, ["--kv-offload-cpus", "'0-7'", "CPU 2", "available are 0-1"]),
    ({"cpus": "1-0"}, ["--kv-offload-cpus", "ascending"]),
]
REFUSED_CONFIGS = [
    (5, ["5", "int", "@FILE"]),
    ("{", ["valid JSON", "line 1"]),
    ("@/no/such/file", ["/no/such/file", "cannot read"]),
    (f'{{"trace": {DEEP}}}', ["recursion", "@FILE"]),
    ('{"recall_interval": ' + "9" * 5000 + "}", ["5000 digits"]),
    ('{"recall": "off", "recall": "fixed"}', ["a key occurs twice", "'recall', 'recall'"]),
    ({"recal": "off"}, ["'recal'", "'recall'"]),
    ({8: "off"}, ["unknown key 8", "known keys: resident_tokens, digest"]),
    ({"recall": "often"}, ["recall", "'often'", "off, fixed, adaptive"]),
    ({"recall_interval": 0}, ["recall_interval", "0", "1 or more"]),
    ({"recall_threshold": 1.5}, ["recall_threshold", "1.5", "0 to 1"]),
    ('{"recall_step_mib": NaN}', ["recall_step_mib", "nan", "0.001"]),
    ({"verify": 1}, ["verify = 1", "true, false"]),
    ({"trace": ""}, ["trace = ''", "name a file"]),
    ({"step_log": "\ud800"}, ["step_log", "name a file"]),
    ({"trace": "a", "step_log": "./a"}, ["step_log = './a'", "trace = 'a' names the same file"]),
    ({"resident_tokens": 33}, ["resident_tokens", "33", "32"]),
    ({"digest": "mean"}, ["digest = 'mean'", "minmax, rotated-2"]),
    ({"exact_layers": 3}, ["exact_layers = 3", "a list of layers"]),
    ({"exact_layers": [1], "precompute": False}, ["= (1,)", "no effect", "precompute = false"]),
]


OF_CONFIG = [({"config": x}, ["--kv-offload-config", *parts]) for x, parts in REFUSED_CONFIGS]


@pytest.mark.parametrize(("kwargs", "parts"), REFUSED_FLAGS + OF_CONFIG)
def test_refused(kwargs, parts):
    with pytest.raises(ConfigError) as caught:
        parse(**kwargs)
    assert isinstance(caught.value, ValueError)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("policy", ["hgca", "sparda", "rheo"])
def test_keys_that_mean_nothing_to_a_policy_are_refused(policy):
    keys = {"exact_layers": [1]}
    with pytest.raises(ConfigError, match=f"has no effect with --kv-offload {policy}; drop"):
        parse_config(policy=policy, policies=policies(), config=keys, available_cpus={0})


def test_keys_are_text_an_object_or_a_file(tmp_path):
    keys = {"recall": "fixed", "exact_layers": (2, 1)}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(keys))
    assert parse(config=keys) == parse(config=f"@{path}")
    assert parse(config=keys) == parse(config='{"recall": "fixed", "exact_layers": [2, 1]}')
    assert parse(config={}) == parse()
    assert parse(host_gb=4).host_gb == 4


@pytest.mark.parametrize("key", ["trace", "step_log"])
def test_files_that_cannot_be_written(tmp_path, key):
    config = parse(config={key: "/proc/x"})
    with pytest.raises(ConfigError, match=f"^--kv-offload-config: {key} = .*cannot be written"):
        check_files(config)
    for place in (f"{tmp_path}/none/a", str(tmp_path)):
        with pytest.raises(ConfigError, match=f"{key} = .*(one that does not exist|be written)"):
            check_files(parse(config={key: place}))
    os.mkfifo(tmp_path / "pipe")  # not opened for the check
    check_files(parse(config={key: str(tmp_path / "pipe")}))
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    for path in (old, new):
        check_files(parse(config={key: str(path)}))
    assert old.read_text() == "kept" and not new.exists()


def test_a_file_under_two_names(tmp_path):
    """By another path, through a link, or as a profile that would be overwritten."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("{}")
    other.hardlink_to(one)
    for trace in (str(other), str(tmp_path / "." / "one")):
        keys = json.dumps({"step_log": str(one), "trace": trace})
        with pytest.raises(ConfigError, match="step_log = .*: .*trace = .* names the same file"):
            parse(config=keys)
    keys = json.dumps({"step_log": str(one)})
    with pytest.raises(ConfigError, match="--kv-offload-recall-profile .* names the same file"):
        parse(config=keys, recall_profile=str(other))
    parse(config=keys, recall_profile=str(tmp_path / "third"))


def test_each_rank_writes_files_of_its_own(tmp_path):
    names = {"trace": "a.d.json", "step_log": "b"}
    given = {key: str(tmp_path / name) for key, name in names.items()}
    found = parse_config(policy="scout", policies={"scout": {}}, config=json.dumps(given))
    assert found.of_rank(0) == found
    second = found.of_rank(2)
    written = (second.trace, second.step_log)
    assert written == tuple(str(tmp_path / name) for name in ("a.d.rank2.json", "b.rank2"))
    assert parse().of_rank(1) == parse()


PROFILE = (
    '{"version": 1, "model": "m", "page_size_tokens": 32, "budget_tokens": 512, "threshold": 0.12,'
    ' "intervals": [3, 4], "num_layers": 2}'
)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("not json", "not a recall profile"),
        (PROFILE.replace('"version": 1', '"version": 9'), "version 9"),
        (PROFILE.replace("[3, 4]", "[3]"), "2 layers"),
        (PROFILE.replace("[3, 4]", f"[{10**30}, 4]"), "`int` <= 2147483648 - at `$.intervals[0]`"),
        (PROFILE.replace("[3, 4]", "[]").replace('"num_layers": 2', '"num_layers": 0'), "0 layers"),
        (PROFILE.replace("0.12", "12"), "`float` <= 1.0 - at `$.threshold`"),
        (PROFILE.replace('"model"', f'"x": {DEEP}, "model"'), "recursion"),
    ],
)
def test_bad_profiles(tmp_path, text, part):
    with pytest.raises(ConfigError, match="cannot read"):
        load_profile("/no/such/profile.json")
    path = tmp_path / "profile.json"
    path.write_text(PROFILE)  # as written by hand
    assert load_profile(str(path)).intervals == [3, 4]
    path.write_text(text)
    with pytest.raises(ConfigError, match="--kv-offload-recall-profile") as caught:
        load_profile(str(path))
    assert part in str(caught.value)


@pytest.mark.rheo
def test_a_key_that_changes_defaults_gives_way_to_what_is_said():
    def parsed(policy, **keys):
        return parse_config(policy=policy, policies=policies(), available_cpus={0}, config=keys)

    def choices(config):
        of_recall = config.recall, config.recall_threshold
        return config.paper, config.digest, config.budget_tokens, config.reweigh, *of_recall

    assert choices(parsed("scout")) == (False, "rotated-2", 1024, True, "adaptive", None)
    assert choices(parsed("scout", paper=True)) == (True, "minmax", 2048, False, "fixed", 0.12)
    said = parsed("scout", paper=True, digest="rotated-2", recall="off")
    assert choices(said) == (True, "rotated-2", 2048, False, "off", 0.12)
    said = parse_config(
        policy="scout", policies=policies(), budget_tokens=512, config={"paper": True}
    )
    assert said.budget_tokens == 512
    assert parsed("scout", paper=False) == parsed("scout")
    with pytest.raises(
        ConfigError, match="paper = True has no effect with --kv-offload rheo; it is for scout"
    ):
        parsed("rheo", paper=True)
