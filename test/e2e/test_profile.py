"""``sglang-scout profile`` and ``report`` on the step log of real servers."""

import json

from harness import PDCluster, random_prompts
from sglang_scout.cli import main
from sglang_scout.core.profile import config_digest, load_profile


def test_profile_of_a_small_model(tiny_model, tmp_path, capsys):
    """That a server takes its own profile, and only that: test/plugin/test_args.py."""
    log, output = tmp_path / "steps.jsonl", tmp_path / "p.json"
    config = json.dumps({"step_log": str(log), "recall": "off"})
    with PDCluster(
        tiny_model(),
        server_args=["--kv-offload", "scout", "--kv-offload-budget", "128"],
        decode_args=["--kv-offload-config", config],
    ) as servers:
        servers.generate(random_prompts([600, 600]), max_new_tokens=26)
    assert main(["profile", str(log), "--output", str(output), "--json"]) == 0
    profile = load_profile(str(output))
    assert json.loads(capsys.readouterr().out)["intervals"] == profile.intervals
    assert len(profile.samples) >= 20 and profile.num_layers == len(profile.curves) == 4
    assert all(0 <= ratio <= 1 for curve in profile.curves for ratio in curve)
    assert max(map(max, profile.curves)) > 0, "the CPU computed nothing"
    own = json.loads((tiny_model() / "config.json").read_text())
    assert profile.identity is not None and profile.identity.config_digest == config_digest(own)
    assert main(["report", str(log), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ratio_by_layer"]) == 4
