"""Sparse decoding on real servers: each layer's output against a plain reference over the same pages."""

import json
import re

from harness import PDCluster, random_prompts

BUDGET_TOKENS = 128


def cluster(model, config, **kwargs):
    settings = {"verify": True, "recall_interval": 4, **config}
    return PDCluster(
        model,
        server_args=[
            *("--kv-offload", "scout", "--kv-offload-budget", str(BUDGET_TOKENS)),
            *("--kv-offload-config", json.dumps(settings)),
        ],
        max_running_requests=8,
        max_total_tokens=32768,
        **kwargs,
    )


def test_bf16_with_metrics_and_trace(tiny_model, tmp_path):
    trace = tmp_path / "trace.json"
    config = {"trace": str(trace), "trace_steps": 20}
    model = tiny_model("qwen3", dtype="bfloat16")
    with cluster(model, config, dtype="bfloat16", decode_args=["--enable-metrics"]) as servers:
        prompts = random_prompts([900, 1200, 37, 1500, 640, 1111], seed=3)
        answers = servers.generate(prompts, max_new_tokens=60)
        assert [len(a.output_ids) for a in answers] == [60] * 6
        state = servers.kv_offload()
        assert state["verify_checks"] == 4 * state["steps"]
        assert 0 < state["verify_max_rel_error"] <= 1e-2
        assert state["cpu_pages"] > 0 and state["recalled_pages"] > 0
        page_bytes = 2 * 32 * 2 * 64 * 2  # K and V; 32 tokens, 2 heads, 64 channels, bf16
        assert state["recall_bytes"] % page_bytes == 0
        # A page whose request ended while it was copied moved bytes for nothing.
        assert state["recall_bytes"] >= state["recalled_pages"] * page_bytes
        assert 0 < state["cpu_compute_ratio"] < 0.9
        assert state["digests_received"] > 0
        assert servers.kv_offload("prefill")["digests_sent"]

        text = servers.metrics()
        for name in ("cpu_pages_total", "recalled_pages_total", "worker_up", "host_pages_used"):
            assert f"sglang:kv_offload_{name}" in text, text[-2000:]

        events = json.loads(trace.read_text())["traceEvents"]
        slices = [e for e in events if e["ph"] == "X"]
        assert {e["name"] for e in slices} >= {"layer 0", "attend 3", "wait 2", "recall"}
        assert all(e["dur"] >= 0 for e in slices)
        assert max(e["args"]["step"] for e in slices) == 20


def test_fp32_without_digests_from_prefill_and_with_retractions(tiny_model):
    """The decode server makes the digests itself; requests are retracted and come back in mid-decode."""
    environment = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}
    config = {"prefill_digests": False}
    with cluster(tiny_model("llama"), config, env=environment) as servers:
        prompts = random_prompts([900, 700, 33, 640], seed=4)
        answers = servers.generate(prompts, max_new_tokens=80)
        assert [len(a.output_ids) for a in answers] == [80] * 4
        state = servers.kv_offload()
        assert state["digests_received"] == 0 and state["digests_computed"] > 70
        assert not servers.kv_offload("prefill")["digests_sent"]
        assert state["verify_checks"] == 4 * state["steps"]
        assert 0 < state["verify_max_rel_error"] <= 1e-5
        assert state["cpu_pages"] > 0
        assert state["host_pages_used"] == 0
        log = servers.servers["decode"].log()
        assert re.search(r"retracted_reqs: [1-9]", log), "no request was retracted"
