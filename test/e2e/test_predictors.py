"""Predictors on real servers: recorded, fitted on what was recorded, and serving, checked layer by layer."""

import json

import pytest

from harness import PDCluster, random_prompts
from sglang_scout.core.correction import save_correction
from sglang_scout.core.fit import fit_correction, read_inputs

LAYERS, TOKENS = 4, 40


def cluster(model, **config):
    return PDCluster(
        model,
        server_args=["--kv-offload", "scout", "--kv-offload-budget", "128"],
        decode_args=["--kv-offload-config", json.dumps({"verify": True, **config})],
        max_running_requests=8,
        max_total_tokens=16384,
    )


def serve(servers, seed):
    prompts = random_prompts([900, 1200, 37, 640, 500, 333], seed=seed)
    answers = servers.generate(prompts, max_new_tokens=TOKENS)
    assert [len(a.output_ids) for a in answers] == [TOKENS] * len(prompts)
    state = servers.kv_offload()
    assert state["verify_checks"] == LAYERS * state["steps"]
    assert 0 < state["verify_max_rel_error"] <= 1e-5
    assert state["cpu_pages"] > 0


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


@pytest.mark.slow  # its parts have tests of their own: test_quality.py, test_correction.py
def test_a_correction_fitted_on_what_a_server_recorded_serves_on_another(tiny_model, tmp_path):
    model, first, second = tiny_model("qwen2"), tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    with cluster(model, predictor="extrapolate", quality=str(first), quality_inputs=180) as servers:
        serve(servers, seed=11)
    about, inputs, source = read_inputs(f"{first}.npz")
    assert inputs.shape[1] == LAYERS and len(inputs) >= 180
    correction, _ = fit_correction(inputs, source, rank=8, weights=str(about["weights"]))
    save_correction(correction, tmp_path / "c.npz")
    with cluster(
        model, predictor="learned", predictor_file=str(tmp_path / "c.npz"), quality=str(second)
    ) as servers:
        serve(servers, seed=12)
    for path, names in (
        (first, {"next_layer", "extrapolate"}),
        (second, {"next_layer", "extrapolate", "learned"}),
    ):
        lines = records(path)
        assert {line["layer"] for line in lines} == set(range(LAYERS))
        for line in lines:
            assert set(line["cosine"]) == (names if line["layer"] else set())
            assert all(-1 <= cosine <= 1 for cosine in line["cosine"].values())
            for found in line["at"].values():
                assert found["mass"]["real"] <= found["mass"]["best"] + 1e-6
    ahead = [line["cosine"] for line in records(second) if line["layer"]]
    mean = {name: sum(c[name] for c in ahead) / len(ahead) for name in ahead[0]}
    assert min(mean.values()) > 0.2, mean
    assert mean["learned"] > mean["next_layer"], "on prompts that it was not fitted on"
