"""Sparse decoding on real servers: each layer's output against a plain reference over the same pages; the command line
tools on their step log; SIGTERM, more in test_sigterm.py."""

import json
import signal
from functools import partial

import pytest

from harness import PDCluster, random_prompts, wait_until
from in_flight import InFlight, watch
from sglang_scout.cli import main
from sglang_scout.core.profile import config_digest, load_profile

BUDGET_TOKENS = 128
"""All traced requests exceed it, as any of them may arrive first and be alone during the traced steps."""


def check_timeline(path, steps):
    """Every row exists, and the worker's own slices show whether it was ahead; more in test/engine/test_trace.py."""
    events = json.loads(path.read_text())
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices: dict = {}
    for e in events:
        if e["ph"] == "X":
            row = rows[e["pid"], e["tid"]].removesuffix(" (overlapping)")
            kind = e["name"].split()[0]
            kind = "worker" if row.startswith("attention thread") else f"{row} {kind}"
            slices.setdefault(kind, []).append(e)
    assert set(slices) >= {"device layer", "boundary step", "ahead score", "ahead post",
                           "attention wait", "copies recall", "worker"}  # fmt: skip

    def by_layer(kind):
        return {(e["args"]["step"], e["args"]["layer"]): e for e in slices.get(kind, ())}

    device, posted, served = map(by_layer, ("device layer", "ahead post", "worker"))
    assert len(device) == len(slices["device layer"]) == 4 * steps
    assert set(served) <= set(posted) <= {*served, *by_layer("attention fallback")}
    assert set(served) <= set(by_layer("attention wait")), "the wait at each merge is visible"
    # Which of them began before the previous layer ended; how many depends on the machine.
    early = []
    for e in slices["worker"]:
        if e["args"]["layer"] > 0:
            before = device[e["args"]["step"], e["args"]["layer"] - 1]
            early.append(e["ts"] < before["ts"] + before["dur"])
    assert len(early) > steps / 4 and any(early)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def servers(tiny_model, files):
    """In bfloat16, with metrics and a trace; a second decode server writes a step log."""
    trace = {"verify": True, "recall": "fixed", "recall_interval": 4}
    trace |= {"trace": str(files / "trace.json"), "trace_steps": 50}
    log = {"recall": "off", "step_log": str(files / "steps.jsonl")}
    with PDCluster(
        tiny_model("qwen3", dtype="bfloat16"),
        server_args=["--kv-offload", "scout", "--kv-offload-budget", str(BUDGET_TOKENS)],
        decode_args=["--enable-metrics", "--kv-offload-config", json.dumps(trace)],
        more_decodes={"log": ["--kv-offload-config", json.dumps(log)]},
        max_running_requests=8,
        max_total_tokens=32768,
        dtype="bfloat16",
    ) as running:
        yield running


def test_bf16_with_metrics_and_trace(servers, files):
    prompts = random_prompts([900, 1200, 370, 1500, 640, 1111], seed=3)
    answers = servers.generate(prompts, max_new_tokens=60)
    assert [len(a.output_ids) for a in answers] == [60] * 6
    state = servers.kv_offload()
    assert state["verify_checks"] == 4 * state["steps"]
    assert 0 < state["verify_max_rel_error"] <= 1e-2
    assert state["cpu_pages"] > 0 and state["recalled_pages"] > 0
    page_bytes = 2 * 32 * 2 * 64 * 2  # K and V; 32 tokens, 2 heads, 64 channels, bf16
    assert state["recall_bytes"] % page_bytes == 0
    # A page whose request ended during the copy counts bytes without a recall.
    assert state["recall_bytes"] >= state["recalled_pages"] * page_bytes
    assert 0 < state["cpu_compute_ratio"] < 0.9
    assert state["digests_received"] > 0
    assert servers.kv_offload("prefill")["digests_sent"]

    text = servers.metrics()
    for name in ("cpu_pages_total", "recalled_pages_total", "worker_up", "host_pages_used"):
        assert f"sglang:kv_offload_{name}" in text, text[-2000:]

    check_timeline(files / "trace.json", 50)


def test_profile_and_report_of_a_step_log(servers, files, tmp_path, capsys):
    """That a server accepts only its own profile: test/plugin/test_launch.py."""
    log, output = str(files / "steps.jsonl"), str(tmp_path / "p.json")
    servers.generate(random_prompts([600, 600]), "log", max_new_tokens=30)
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


def test_after_sigterm_a_running_request_completes_and_the_server_ends(servers):
    steps = servers.kv_offload("log")["steps"]
    running = InFlight(partial(servers.ask_pair, which="log"), random_prompts([600]), [120])
    wait_until("it runs", lambda: servers.kv_offload("log")["steps"] > steps, 30)
    watch(servers.server_url("log"))
    server = servers.servers["log"]
    server.signal(signal.SIGTERM)
    [outcome] = running.outcomes(20)
    assert outcome.answer and len(outcome.answer.output_ids) == 120, outcome
    assert server.wait(20), "it still runs"
