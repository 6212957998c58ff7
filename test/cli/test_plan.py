"""`sglang-scout plan` against manual arithmetic."""

import json
import math

import pytest

from sglang_scout.cli import GIB, main
from sglang_scout.cli.plan import as_dict
from sglang_scout.cli.sizes import make_plan, read_model
from sglang_scout.core.errors import ConfigError

LONG = 65536


def plan_of(folder, context_tokens=LONG, **kwargs):
    return make_plan(str(folder), context_tokens=context_tokens, **kwargs)


def test_requests_of_64k_tokens_of_the_papers_model(model):
    plan = plan_of(model(), host_gib=107, config='{"digest": "minmax"}', budget_tokens=2048)
    server, memory = plan.server, plan.memory
    assert server.kv_bytes_per_token == 2 * 40 * 8 * 128 * 2 == 163840
    assert server.kv_bytes_per_request == 65536 * 163840
    assert round(server.kv_bytes_per_request / 1e9, 1) == 10.7
    pages = 10 * 2048 + 1  # SGLang's padding
    assert plan.requests == 10 and memory.bytes_of("host pages") == pages * 32 * 163840
    # A page's digest is the minimum and maximum of K: as large as the K and V of one token.
    slots = 10 * 64 + 10 + 64  # budgets, tail pages, in-flight recalls
    on_device = {what: nbytes for what, _, nbytes in memory.device_rows}
    sizes = (pages * 163840, pages * 32 * 6 * 8, slots * 32 * 163840)
    assert tuple(on_device) == ("digests", "input buffers", "resident slots")
    assert tuple(on_device.values()) == sizes and memory.device_bytes == sum(sizes)


def test_what_limits_the_requests_and_whole_pages(model):
    plan = plan_of(model(), host_gib=110e9 / GIB, gpu_gib=80)
    assert plan.stock is not None and plan.stock["requests"] == 4
    assert plan.offload["requests"] == plan.offload["by_host"] == 10
    assert plan.offload["limited_by"] == "host memory"
    assert plan_of(model(), host_gib=4000, gpu_gib=80).offload["limited_by"] == "gpu memory"
    server = plan_of(model(), context_tokens=33, host_gib=1).server
    assert server.pages_per_request == 2 and server.kv_bytes_per_request == 64 * 163840
    for pages, fit in ((2, 0), (3, 1)):  # one is SGLang's padding
        plan = plan_of(model(), context_tokens=64, host_gib=pages * 32 * 163840 / GIB)
        assert plan.offload["by_host"] == fit


def test_the_host_size_and_the_huge_pages_that_it_names_are_enough(model, capsys):
    folder = model()
    command = ["plan", "--model-path", str(folder), "--context-tokens", str(LONG)]
    assert main([*command, "--requests", "7", "--host-gb", "1"]) == 1
    text = capsys.readouterr().out
    assert "7 requests cannot run at once: host memory is too small" in text
    assert "--max-running-requests 7 --context-length 65536" in text
    host = text.split("--kv-offload-host-gb ")[1].split(",")[0]
    assert main([*command, "--requests", "7", "--host-gb", host]) == 0
    assert plan_of(folder, host_gib=float(host)).offload["requests"] == 7
    plan = plan_of(folder, host_gib=400, budget_tokens=2048)
    pages = int(390.1 * 2**30) // (5 << 20) + 1
    assert (plan.requests, plan.host_gib) == (39, 390.1)
    kv_and_ring = pages * (5 << 20) + plan.memory.bytes_of("ring")
    assert plan.huge_pages == math.ceil(kv_and_ring / 2**21)


def test_json_has_the_same_numbers(model, capsys):
    folder, sizes = str(model()), ["--context-tokens", str(LONG), "--host-gb", "103"]
    main(["plan", "--model-path", folder, *sizes, "--gpu-gb", "80", "--json"])
    got = json.loads(capsys.readouterr().out)
    assert got == as_dict(plan_of(folder, host_gib=103, gpu_gib=80))
    assert got["stock"] == {"by_host": None, "by_gpu": 4, "requests": 4, "limited_by": "gpu memory"}
    on_device = sum(row["bytes"] for row in got["memory"] if row["on_device"])
    assert got["device_bytes"] == on_device and got["offload"]["requests"] == 10


@pytest.mark.parametrize(
    ("stored", "asked", "used"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("float32", "auto", "float16"),  # as SGLang does
        (None, "auto", "float16"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_dtype(model, stored, asked, used):
    assert read_model(str(model(torch_dtype=stored)), asked).dtype == used
    assert read_model(str(model(absent=["torch_dtype"], dtype=stored)), asked).dtype == used


@pytest.mark.parametrize("policy", ["scout", "hgca", "infinigen"])
@pytest.mark.parametrize(("context", "requests"), [(33, 64), (2048, 5), (4096, 1), (65536, 64)])
def test_as_many_requests_fit_as_their_plan_allows(model, policy, context, requests):
    """Also contexts below the budget, for which the server has exactly one slot per host page. A server's plan:
    test/plugin/test_ranks.py."""
    server = plan_of(model(), context, host_gib=1, policy=policy).server
    needed = server.memory(requests).device_bytes
    assert server.fitting(needed) == requests
    assert server.fitting(needed - 1) == requests - 1


@pytest.mark.hgca
def test_each_policy_takes_what_is_its_own(model, capsys):
    """What the others take: test/engine/test_memory.py."""
    memory = plan_of(model(), 40960, host_gib=1000, policy="hgca", requests=8).memory
    assert memory.bytes_of("kept tokens") == int(0.3 * (8 * 1280 + 1)) * 32 * 163840
    # Layers, requests, heads: averages of the window's tokens, and a list of all pages.
    values = 40 * 8 * 8 * (4096 + 1280) + 40 * 8 * 40 * 128
    assert memory.bytes_of("step buffers") == 4 * values
    command = ["plan", "--model-path", str(model()), "--context", "40960", "--host-gb", "1000"]
    command += ["--gpu", "h100", "--requests", "8", "--kv-offload"]
    assert main([*command, "hgca"]) == 0
    assert "No step is predicted" in capsys.readouterr().out


def test_no_more_requests_and_tokens_than_a_server_takes(model):
    many = plan_of(model(), 1, host_gib=2**30)
    assert many.offload["requests"] == 65536, "no more than the server takes"
    with pytest.raises(ConfigError, match="-budget 1099511627776: num_pages=.*lower the budget"):
        plan_of(model(), budget_tokens=2**40, context_tokens=2**40, host_gib=1)


def test_kv_in_fp8_is_half_as_large_and_digests_are_not_smaller(model):
    plain = plan_of(model(), host_gib=200)
    small = plan_of(model(), host_gib=200, kv_cache_dtype="fp8_e4m3")
    assert 2 * small.server.kv_bytes_per_request == plain.server.kv_bytes_per_request
    assert small.server.digest_bytes_per_page == plain.server.digest_bytes_per_page
    assert (plain.requests, small.requests) == (19, 39), "a page is SGLang's padding"


def test_weights_from_files_from_the_index_or_estimated(model):
    folder = model()
    index = folder / "model.safetensors.index.json"
    for size in (-5, "x", 1e999):
        index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": {}}))
        estimated = read_model(str(folder), "auto")
        assert "estimated" in estimated.weight_source
        assert math.isclose(estimated.weight_bytes, 14.77e9 * 2, rel_tol=0.01), "14.8 billion, bf16"
    index.write_text(json.dumps({"metadata": {"total_size": 1000}, "weight_map": {}}))
    assert read_model(str(folder), "auto").weight_bytes == 1000
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(b"x" * 600)
    got = read_model(str(folder), "auto")
    assert (got.weight_bytes, got.weight_source) == (1200, "from safetensors files")
    assert read_model(str(folder), "float32").weight_bytes == 2400
    model(quantization_config={"quant_method": "awq", "bits": 4})
    for dtype in ("auto", "float32"):
        found = read_model(str(folder), dtype)
        assert found.weight_bytes == 1200 and "quantised" in found.weight_source
    assert found.value_bytes == 4, "of KV, which is not quantised"


def test_models_that_the_server_takes(model):
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    assert read_model(str(model(absent=["head_dim"], **qwen2)), "auto").head_dim == 128
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    found = read_model(str(model(**mistral, sliding_window=None)), "auto")
    assert (found.num_kv_heads, found.max_context_tokens) == (8, 131072), "a window of null is none"


MODELS = [
    ({"num_key_value_heads": "abc"}, "cannot read config.json: "),
    ({"model_type": "own"}, "cannot read config.json: "),
    ({"num_key_value_heads": 3}, "40 query heads and 3 KV heads, 1 of 1 MLPs"),
    ({"vocab_size": 0}, "and 0 words, expected positive numbers"),
    ({"torch_dtype": "float64"}, "dtype float64, expected one of bfloat16"),
    ({"architectures": ["DeepseekV3ForCausalLM"]}, "does not support DeepseekV3ForCausalLM"),
    ({"architectures": ["Gemma3ForCausalLM"]}, "does not support Gemma3ForCausalLM, some"),
    ({"use_sliding_window": True}, "does not support sliding-window attention"),
    ({"head_dim": 80}, "head size 80 and V 80; --kv-offload supports 64, 96, 128, 256"),
    ({"v_head_dim": 64}, "head size 128 and V 64"),
    ({"quantization_config": {"bits": 4}}, "the size of quantised weights is only known from"),
]


@pytest.mark.parametrize(("changes", "words"), MODELS, ids=str)
def test_models_that_the_server_refuses_or_cannot_read(model, capsys, changes, words):
    folder = model(**changes)
    assert main(["plan", "--model-path", str(folder), "--host-gb", "100"]) == 2
    error = capsys.readouterr().err
    assert f"plan: --model-path {folder}: " in error and words in error


def test_what_is_no_model(model, tmp_path):
    for text in ("{", "[" * 100_000, "[]"):
        (model() / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="cannot read config.json"):
            read_model(str(tmp_path / "model"), "auto")
    with pytest.raises(ConfigError, match=f"--model-path {tmp_path}/no: there is no such folder"):
        read_model(f"{tmp_path}/no", "auto")
    for name in (str(tmp_path), "no/such-model"):
        with pytest.raises(ConfigError, match=f"--model-path {name}.*Hugging Face Hub"):
            read_model(name, "auto")


KEYS = "--kv-offload-config"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "1000"], "--kv-offload-budget 1000: must be a positive multiple"),
        (["--context-tokens", "9" * 400], "--context-tokens 999"),
        (["--requests", "65537"], "--requests 65537: must be greater than 0 and at most 65536"),
        (["--host-gb", "nan"], "--host-gb nan"),
        (["--mem-fraction-static", "0"], "--mem-fraction-static 0.0: must be greater than 0"),
        (["--gpu", "v100"], "--gpu v100: unknown GPU, known are a100, h100, h200, b200, l40s, rtx"),
        (["--gpu", "v100"], "gh200; for another give --gpu-gb N"),
        (["--gpu", "RTX 6000"], "unknown GPU (did you mean rtx-pro-6000 or rtx-6000-ada?)"),
        (["--gpu", "H100 PCIe"], "unknown GPU, known"),
        (
            ["--gpu", "no.json"],
            "No such file or directory: 'no.json'; give a JSON object of some of",
        ),
        (["--kv-offload", "none"], "--kv-offload 'none': unknown policy"),
        pytest.param(
            ["--kv-offload", "sparda"],
            "needs --kv-offload-config '{\"forecast_file\": FILE}'",
            marks=pytest.mark.sparda,
        ),
        ([KEYS, '{"digest": "x"}'], "digest = 'x': Invalid enum value 'x'; it takes minmax"),
    ],
)
def test_wrong_arguments_are_named(model, capsys, arguments, words):
    assert main(["plan", "--model-path", str(model()), *arguments]) == 2
    assert words in capsys.readouterr().err
