"""`sglang-scout plan` against manual arithmetic."""

import json
import math

import pytest

from sglang_scout.cli import main
from sglang_scout.cli.model_config import read_model
from sglang_scout.cli.sizes import make_plan
from sglang_scout.cli.table import GIB
from sglang_scout.core.errors import ConfigError

QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path):
    def write(**changes):
        config = QWEN3_14B | changes
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def plan_of(folder, **kwargs):
    return make_plan(str(folder), **kwargs)


def on_device(plan):
    """Bytes by use."""
    return {what: nbytes for what, _, nbytes in plan.memory.device_rows}


def test_requests_of_64k_tokens_of_the_papers_model(model):
    plan = plan_of(
        model(),
        context_tokens=65536,
        host_gib=107,
        config='{"digest": "minmax"}',
        budget_tokens=2048,
    )
    server, memory = plan.server, plan.memory
    assert server.kv_bytes_per_token == 2 * 40 * 8 * 128 * 2 == 163840
    assert server.kv_bytes_per_request == 65536 * 163840
    assert round(server.kv_bytes_per_request / 1e9, 1) == 10.7
    pages = 10 * 2048 + 1  # SGLang's padding
    assert plan.requests == 10 and memory.host_bytes == pages * 32 * 163840
    # A page's digest is the minimum and maximum of K: as large as the K and V of one token.
    slots = 10 * 64 + 10 + 64  # budgets, tail pages, in-flight recalls
    assert on_device(plan) == {
        "digests": pages * 163840, "input buffers": pages * 32 * 6 * 8, "resident slots": slots * 32 * 163840,
    }  # fmt: skip
    assert memory.device_bytes == sum(on_device(plan).values())


def test_how_many_fit_on_an_80_gb_card_with_110_gb_of_host_memory(model):
    plan = plan_of(model(), context_tokens=65536, host_gib=110e9 / GIB, gpu_gib=80)
    assert plan.stock is not None and plan.stock.requests in (3, 4)
    assert plan.offload.requests == plan.offload.by_host == 10
    assert plan.offload.limited_by == "host memory"
    more_host = plan_of(model(), context_tokens=65536, host_gib=4000, gpu_gib=80)
    assert more_host.offload.limited_by == "gpu memory"


def test_whole_pages_and_the_padding_page(model):
    server = plan_of(model(), context_tokens=33, host_gib=1).server
    assert server.pages_per_request == 2 and server.kv_bytes_per_request == 64 * 163840
    for pages, fit in ((2, 0), (3, 1)):
        plan = plan_of(model(), context_tokens=64, host_gib=pages * 32 * 163840 / GIB)
        assert plan.offload.by_host == fit


def test_the_host_size_that_it_names_is_enough(model, capsys):
    folder = model()
    arguments = ["plan", "--model-path", str(folder), "--context-tokens", "65536"]
    assert main([*arguments, "--requests", "7", "--host-gb", "1"]) == 1
    text = capsys.readouterr().out
    assert "7 requests cannot run at once: host memory is too small" in text
    assert "--max-running-requests 7 --context-length 65536" in text
    host = text.split("--kv-offload-host-gb ")[1].split(",")[0]
    assert main([*arguments, "--requests", "7", "--host-gb", host]) == 0
    assert plan_of(folder, context_tokens=65536, host_gib=float(host)).offload.requests == 7


def test_json_has_the_same_numbers(model, capsys):
    folder = model()
    main(["plan", "--model-path", str(folder), "--context-tokens", "65536", "--host-gb", "103",
          "--gpu-gb", "80", "--json"])  # fmt: skip
    got = json.loads(capsys.readouterr().out)
    plan = plan_of(folder, context_tokens=65536, host_gib=103, gpu_gib=80)
    assert got["offload"]["requests"] == plan.offload.requests == 10
    assert got["kv_bytes_per_token"] == plan.server.kv_bytes_per_token
    assert got["stock"] == {"by_host": None, "by_gpu": 4, "requests": 4, "limited_by": "gpu memory"}
    rows = [(row["what"], row["count"], row["bytes"]) for row in got["memory"]]
    assert rows == list(plan.memory.rows)
    on_device = sum(row["bytes"] for row in got["memory"] if row["on_device"])
    assert got["device_bytes"] == on_device == plan.memory.device_bytes


def test_defaults_of_a_sparse_config(model):
    folder = model(head_dim=None, num_key_value_heads=None, max_position_embeddings=None)
    got = read_model(str(folder), "auto")
    assert (got.num_kv_heads, got.head_dim, got.max_context_tokens) == (40, 128, 32768)


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
    assert read_model(str(model(torch_dtype=None, dtype=stored)), asked).dtype == used


@pytest.mark.parametrize("policy", ["scout", "hgca", "infinigen"])
@pytest.mark.parametrize(("context", "requests"), [(33, 64), (2048, 5), (4096, 1), (65536, 64)])
def test_as_many_requests_fit_as_their_plan_allows(model, policy, context, requests):
    """Also contexts below the budget, for which the server has exactly one slot per host page. A server's plan:
    test/plugin/test_host_size.py."""
    server = plan_of(model(), context_tokens=context, host_gib=1, policy=policy).server
    needed = server.memory(requests).device_bytes
    assert server.fitting(needed) == requests
    assert server.fitting(needed - 1) == requests - 1


def test_each_policy_takes_what_is_its_own(model, capsys):
    command = [
        "plan",
        "--model-path",
        str(model()),
        "--context",
        "40960",
        "--host-gb",
        "1000",
        "--gpu",
        "h100",
    ]

    def memory(policy):
        assert main([*command, "--requests", "8", "--kv-offload", policy, "--json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert ("step" in made) == (policy == "scout"), "the model of a step is of that one"
        return {row["what"]: (row["bytes"], row["on_device"]) for row in made["memory"]}

    fetched = memory("infinigen")["step buffers"]
    assert fetched == (2 * 8 * 32 * 2 * 32 * 8 * 128 * 2, True), "two layers' budgets"
    windowed = memory("hgca")
    pages = 8 * 1280 + 1
    assert windowed["kept tokens"] == (int(0.3 * pages) * 32 * 163840, False)
    # Layers, requests, heads: averages of the window's tokens, and a list of all pages.
    rows = 40 * 8 * 8
    assert windowed["step buffers"][0] == 4 * (rows * (4096 + 1280) + 40 * 8 * 40 * 128)
    assert {*windowed} ^ {*memory("scout")} == {"kept tokens", "step buffers", "hints"}
    assert main([*command, "--kv-offload", "hgca"]) == 0
    assert "No step is predicted" in capsys.readouterr().out


def test_host_memory_for_the_worker_beside_the_pages(model, capsys):
    command = ["plan", "--model-path", str(model()), "--host-gb", "1000", "--budget", "2048"]
    assert main([*command, "--requests", "64"]) == 0
    # 0.91 for the worker, 5 KiB for each page's hint.
    assert "up to 1.30 GiB of host memory beside the pages" in capsys.readouterr().out
    sizes = {"host_gib": 1, "budget_tokens": 2048}
    of_64, most = (
        plan_of(model(), requests=n, **sizes).memory.worker.total_bytes for n in (64, 65536)
    )
    assert most > 900 * of_64
    many = plan_of(model(), context_tokens=1, host_gib=2**30)
    assert many.offload.requests == 65536, "no more than the server takes"
    with pytest.raises(ConfigError, match="--budget 1099511627776: num_pages=.*lower the budget"):
        plan_of(model(), budget_tokens=2**40, context_tokens=2**40, host_gib=1)


def test_huge_pages_are_those_of_the_flags_that_it_prints(model, capsys):
    plan = plan_of(model(), context_tokens=65536, host_gib=400, budget_tokens=2048)
    pages = int(390.1 * 2**30) // (5 << 20) + 1
    ring = plan.memory.worker.ring_bytes
    assert (plan.requests, plan.host_gib) == (39, 390.1)
    assert plan.huge_pages == math.ceil((pages * (5 << 20) + ring) / 2**21)
    command = ["plan", "--model-path", str(model()), "--host-gb", "400", "--context", "65536"]
    assert main(command) == 0
    said = int(capsys.readouterr().out.partition("sysctl vm.nr_hugepages=")[2].split(".")[0])
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["huge_pages"] == said >= 390.1 * 512


def test_weights_from_files_from_the_index_or_estimated(model):
    folder = model()
    estimated = read_model(str(folder), "auto")
    assert "estimated" in estimated.weight_source
    assert math.isclose(estimated.weight_bytes, 14.77e9 * 2, rel_tol=0.01), "14.8 billion, bf16"
    index = {"metadata": {"total_size": 1000}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_model(str(folder), "auto").weight_bytes == 1000
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(b"x" * 600)
    got = read_model(str(folder), "auto")
    assert (got.weight_bytes, got.weight_source) == (1200, "from safetensors files")
    assert read_model(str(folder), "float32").weight_bytes == 2400


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "1000"], "plan: --budget 1000: must be a positive multiple of the page size"),
        (["--context-tokens", "9" * 400], "--context-tokens 999"),
        (["--requests", "65537"], "--requests 65537: must be greater than 0 and at most 65536"),
        (["--host-gb", "nan"], "--host-gb nan"),
        (["--mem-fraction-static", "0"], "--mem-fraction-static 0.0: must be greater than 0"),
        (["--kv-offload", "none"], "--kv-offload 'none': unknown policy"),
        (["--kv-offload", "sparda"], "needs --kv-offload-config '{\"forecast_file\": FILE}'"),
        (
            ["--kv-offload-config", '{"digest": "x"}'],
            "digest = 'x': Invalid enum value 'x'; it takes minmax",
        ),
        (
            ["--kv-offload-config", '{"digest": "calibrated"}'],
            "needs --kv-offload-config '{\"digest_file\": FILE}'",
        ),
        (
            ["--kv-offload-config", '{"digest_file": "w", "grain": "head"}'],
            "'calibrated' cannot be used with grain = 'head'",
        ),
        (
            ["--kv-offload", "infinigen", "--kv-offload-config", '{"digest": "calibrated"}'],
            "'calibrated' cannot be used with --kv-offload infinigen",
        ),
    ],
)
def test_wrong_arguments_are_named(model, capsys, arguments, words):
    assert main(["plan", "--model-path", str(model()), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_quantised_weights_take_what_their_files_take(model):
    folder = model(quantization_config={"quant_method": "awq", "bits": 4})
    (folder / "model.safetensors").write_bytes(bytes(12345))
    for dtype in ("auto", "float32"):
        found = read_model(str(folder), dtype)
        assert found.weight_bytes == 12345 and "quantised" in found.weight_source
    assert found.value_bytes == 4, "of KV, which is not quantised"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": "abc"}, "num_key_value_heads = 'abc', expected a positive whole"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3, expected a divisor of 40"),
        ({"num_hidden_layers": 10**20}, "num_hidden_layers = 100000000000000000000, expected"),
        ({"torch_dtype": ["bfloat16"]}, "torch_dtype = ['bfloat16'], expected one of bfloat16"),
        ({"head_dim": None, "hidden_size": 2}, "hidden_size = 2, expected at least 40, the number"),
        ({"head_dim": "x" * 9999}, "...xxxxx"),
        ({"text_config": 5}, "text_config = 5, expected an object"),
        ({"architectures": [5]}, "does not support (no architecture named)"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "does not support Gemma3ForCausalLM, some"),
        ({"use_sliding_window": True}, "does not support sliding-window attention"),
        ({"head_dim": 80}, "head size 80 and V 80; --kv-offload supports 64, 96, 128, 256"),
        ({"v_head_dim": 64}, "head size 128 and V 64"),
    ],
)
def test_models_that_the_server_refuses_or_cannot_read(model, capsys, changes, words):
    folder = model(**changes)
    assert main(["plan", "--model-path", str(folder), "--host-gb", "100"]) == 2
    error = capsys.readouterr().err
    assert f"plan: --model-path {folder}: " in error and words in error


def test_models_that_the_server_takes(model):
    assert plan_of(model(text_config={}), host_gib=100).fits
    folder = model(architectures=["MistralForCausalLM"], intermediate_size=None, vocab_size=None)
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert plan_of(folder, host_gib=100).fits, "a window of null is none"


def test_an_index_without_a_usable_size_is_passed_over(model):
    folder = model()
    for size in (-5, "x", 1e999, None):
        index = {"metadata": {"total_size": size}, "weight_map": {}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "estimated" in read_model(str(folder), "auto").weight_source


def test_folders_that_are_no_model(tmp_path, model):
    with pytest.raises(ConfigError, match="cannot read config.json"):
        read_model(str(tmp_path), "auto")
    with pytest.raises(ConfigError, match="latent attention"):
        read_model(str(model(kv_lora_rank=512)), "auto")
    with pytest.raises(ConfigError, match="the size of quantised weights"):
        read_model(str(model(quantization_config={"bits": 4})), "auto")
    for text in ("{", "[" * 100_000):
        (model() / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="not valid JSON"):
            read_model(str(tmp_path / "model"), "auto")


@pytest.mark.parametrize("fp8", ["fp8_e4m3", "fp8_e5m2"])
def test_kv_in_fp8_is_half_as_large_and_digests_are_not_smaller(model, fp8):
    sizes = {"context_tokens": 65536, "gpu_gib": 80}
    # GiB at which host memory is the limit with either, and at which digests are with fp8.
    of_host, of_both = 200, 400
    plain = plan_of(model(), host_gib=of_host, **sizes)
    small = plan_of(model(), host_gib=of_host, kv_cache_dtype=fp8, **sizes)
    assert 2 * small.server.kv_bytes_per_request == plain.server.kv_bytes_per_request
    assert small.server.digest_bytes_per_page == plain.server.digest_bytes_per_page
    for plan in (plain, small):
        assert plan.offload.limited_by == "host memory"
    assert (plain.requests, small.requests) == (19, 39), "a page is SGLang's padding"
    most = plan_of(model(), host_gib=of_both, kv_cache_dtype=fp8, **sizes)
    assert (most.requests, most.offload.limited_by) == (50, "gpu memory")
