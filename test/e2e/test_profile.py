"""``sglang-scout profile`` on the step log of real servers: a profile that a server loads."""

import json

from harness import PDCluster, random_prompts
from sglang_scout.cli import main
from sglang_scout.core.profile import FLAG, load_profile


def test_profile_of_a_small_model(tiny_model, tmp_path, capsys):
    log, output = tmp_path / "steps.jsonl", tmp_path / "p.json"
    model, prompts = tiny_model(), random_prompts([600, 600])
    shared = {"server_args": ["--kv-offload", "scout", "--kv-offload-budget", "128"]}
    config = json.dumps({"step_log": str(log), "recall": "off"})
    with PDCluster(model, decode_args=["--kv-offload-config", config], **shared) as servers:
        servers.generate(prompts, max_new_tokens=26)
    assert main(["profile", str(log), "--output", str(output), "--json"]) == 0
    profile = load_profile(str(output))
    assert json.loads(capsys.readouterr().out)["intervals"] == profile.intervals
    assert len(profile.samples) >= 24 and profile.num_layers == len(profile.curves) == 4
    assert all(0 <= ratio <= 1 for curve in profile.curves for ratio in curve)
    assert max(map(max, profile.curves)) > 0, "the CPU computed nothing"
    assert profile.identity is not None and profile.identity.architecture == "Qwen3ForCausalLM"

    config = json.dumps({"step_log": str(log), "recall": "profile"})
    decode_args = ["--kv-offload-config", config, FLAG, str(output)]
    with PDCluster(model, decode_args=decode_args, **shared) as servers:
        servers.generate(prompts, max_new_tokens=26)
    assert main(["report", str(log), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["recall"] == "profile" and len(report["ratio_by_layer"]) == 4
