"""Sparse decoding on real servers: each layer's output against a plain reference over the same pages; metrics, a trace,
and the command line tools on a step log."""

import json
import signal

import pytest

from harness import SCOUT, TRACE_STEPS, PDCluster, random_prompts
from servers.group import flags
from sglang_scout.cli import main
from sglang_scout.core.profile import config_digest, load_profile

PROMPTS = random_prompts([900, 1200, 370, 1500, 640, 1111], seed=3)
KINDS = "device layer,boundary step,ahead score,ahead post,attention wait,copies recall,worker"


def check_timeline(path):
    """Every row exists, and some pages were begun before the layer before ended; more in test/engine/test_trace.py."""
    events = json.loads(path.read_text())
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices: dict = {}
    for e in (e for e in events if e["ph"] == "X"):
        row = rows[e["pid"], e["tid"]].removesuffix(" (overlapping)")
        kind = "worker" if row.startswith("attention thread") else f"{row} {e['name'].split()[0]}"
        slices.setdefault(kind, {})[e["args"]["step"], e["args"].get("layer")] = e
    assert slices.keys() >= set(KINDS.split(","))
    device, served = slices["device layer"], slices["worker"]
    assert len(device) == 4 * TRACE_STEPS
    assert served.keys() <= slices["attention wait"].keys(), "the wait at each merge is visible"
    ends = {place: e["ts"] + e["dur"] for place, e in device.items()}
    early = [e["ts"] < ends[step, layer - 1] for (step, layer), e in served.items() if layer > 0]
    assert len(early) > TRACE_STEPS / 4 and any(early)


def test_metrics_and_trace(servers, outputs):
    answers = servers.generate(PROMPTS, "decode", max_new_tokens=TRACE_STEPS)
    assert [len(a.output_ids) for a in answers] == [TRACE_STEPS] * 6
    state, sender = servers.kv_offload(), servers.kv_offload("prefill")
    assert state["cpu_pages"] > 0 and 0 < state["cpu_compute_ratio"] < 0.9
    assert state["digests_received"] > 0 and sender["digests_sent"] and sender["hints_made"] >= 6
    text = servers.metrics()
    for name in ("cpu_pages_total", "recalled_pages_total", "worker_up", "host_pages_used"):
        assert f"sglang:kv_offload_{name}" in text, text[-2000:]
    check_timeline(outputs["trace"])


@pytest.mark.slow  # two servers
def test_bf16_as_in_the_paper(tiny_model, tmp_path):
    """At the intervals that the tool made of the decode server's own log, as the refusal without them says."""
    paper, (log, profile) = {"paper": True}, (str(tmp_path / name) for name in "sp")
    served = {"prefill": paper, "decode": paper | {"recall": "off", "step_log": log}}
    with PDCluster(
        tiny_model("qwen3", dtype="bfloat16"),
        server_args=SCOUT + flags(dtype="bfloat16", max_running_requests=8, max_total_tokens=32768),
        servers={name: flags(kv_offload_config=json.dumps(keys)) for name, keys in served.items()},
        router_args=None,
    ) as pair:
        pair.generate(PROMPTS, "decode", max_new_tokens=60)
        assert main(["profile", log, "--output", profile]) == 0
        decode = pair.servers["decode"]
        decode.signal(signal.SIGKILL)
        config = json.dumps(paper | {"verify": True})
        decode.command += flags(kv_offload_config=config, kv_offload_recall_profile=profile)
        pair.restart("decode")
        pair.generate(PROMPTS, "decode", max_new_tokens=60)
        state = pair.kv_offload()
    assert state["recall"] == {"mode": "fixed", "intervals": load_profile(profile).intervals}
    assert state["digests_received"] > 0
    assert state["verify_checks"] == 4 * state["steps"]
    assert 0 < state["verify_max_rel_error"] <= 1e-2
    assert state["cpu_pages"] > 0 and state["recalled_pages"] > 0
    page_bytes = 2 * 32 * 2 * 64 * 2  # K and V; 32 tokens, 2 heads, 64 channels, bf16
    assert state["recall_bytes"] % page_bytes == 0
    # A page whose request ended during the copy counts bytes without a recall.
    assert state["recall_bytes"] >= state["recalled_pages"] * page_bytes


def test_profile_and_report_of_a_step_log(servers, outputs, tmp_path, capsys):
    """That a server accepts only its own profile: test/plugin/test_launch.py."""
    log, output = str(outputs["step_log"]), str(tmp_path / "p.json")
    servers.generate(random_prompts([600, 600]), max_new_tokens=30)
    assert main(["profile", log, "--output", output, "--json"]) == 0
    profile = load_profile(output)
    assert json.loads(capsys.readouterr().out)["intervals"] == profile.intervals
    assert len(profile.samples) >= 20 and profile.num_layers == len(profile.curves) == 4
    assert all(0 <= ratio <= 1 for curve in profile.curves for ratio in curve)
    assert max(map(max, profile.curves)) > 0, "the CPU computed nothing"
    own = json.loads((servers.model_dir / "config.json").read_text())
    assert profile.identity is not None and profile.identity.config_digest == config_digest(own)
    assert main(["report", log, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ratio_by_layer"]) == 4
