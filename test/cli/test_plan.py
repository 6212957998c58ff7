"""`sglang-scout plan` against manual arithmetic."""

import json
import math
import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from command_lines import of_shell, parsed, program
from sglang_scout.cli import GIB, main
from sglang_scout.cli.models import SHAPE, read_model
from sglang_scout.cli.plan import as_dict, as_text
from sglang_scout.cli.sizes import make_plan
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


@pytest.mark.parametrize(
    ("sizes", "short"),
    [
        (["--host-gb", "30"], "Host memory for KV is short by 40.1 GiB."),
        (["--host-gb", "400", "--gpu-gb", "35"], "GPU memory is short by 3.9 GiB"),
        (["--host-gb", "30", "--gpu-gb", "24"], "(the weights take 27.51 GiB)"),
    ],
)
def test_what_does_not_fit_is_said_with_values_that_do(model, capsys, sizes, short):
    command = ["plan", str(model()), "--context", str(LONG), "--requests", "7"]
    assert main([*command, *sizes]) == 1
    text = capsys.readouterr().out
    assert "Not 7 requests of 65,536 tokens at once." in text and short in text
    assert "launch_server" not in text
    fixes = re.search("What would fit: (.*)\\.", text)[1].split(", or ")
    assert len(fixes) == (3 if "27.51" not in short else 1), "on 24 GiB the weights alone do not"
    for fix in fixes:
        words = fix.replace(" with", "").split()
        assert main([*command, *sizes, *words]) == 0
        for flag, value in zip(words[::2], words[1::2], strict=True):
            less = (
                float(value) - 0.2 if "." in value else int(value) + (32 if "cont" in flag else 1)
            )
            assert main([*command, *sizes, *words, flag, str(less)]) == 1, "and no more than that"


def test_the_host_size_and_the_huge_pages_that_it_names_are_enough(model):
    plan = plan_of(model(), host_gib=400, budget_tokens=2048)
    pages = int(390.1 * 2**30) // (5 << 20) + 1
    assert (plan.requests, plan.host_gib) == (39, 390.1)
    assert plan_of(model(), host_gib=390.1).offload["requests"] == 39
    kv_and_ring = pages * (5 << 20) + plan.memory.bytes_of("ring")
    assert plan.huge_pages == math.ceil(kv_and_ring / 2**21)


def test_it_answers_first_and_explains_each_row(model, capsys):
    sizes = ["--context", str(LONG), "--host-gb", "400", "--gpu-gb", "80"]
    assert main(["plan", str(model()), *sizes]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "What fits\n  39 requests of 65,536 tokens at once. Stock SGLang, with KV on the same GPU: 4.\n"
        "  Host memory (400.00 GiB) holds 39.\n"
    )
    assert "The limit is host memory." in said
    titles = "What fits", "What to pass", "Memory of 39 requests", "KV per token"
    places = [said.index(title) for title in titles]
    assert places == sorted(places)
    for changes in {"policy": "infinigen"}, {"config": '{"page_checksums": true}'}:
        plan = plan_of(model(), host_gib=400, **changes)
        assert all(f"\n    {what}  " in as_text(plan) for what, _, _ in plan.memory.rows)


def launched(text):
    """Flags of the two servers that a plan starts, and the router's words."""
    found = [program(words) for words in of_shell(text)]
    assert [name for name, _ in found] == ["server", "server", "router"]
    prefill, decode, router = (words for _, words in found)
    return *(dict(zip(x[::2], x[1::2], strict=True)) for x in (prefill, decode)), router


def test_the_servers_get_what_was_planned(model):
    folder = model().rename(model().with_name("a model"))
    few = plan_of(folder, host_gib=400, requests=7)
    prefill, decode, _ = launched(as_text(few))
    path = {"--model-path": str(folder), "--kv-offload": "scout", "--context-length": "65536"}
    assert prefill == path | {"--port": "30000", "--disaggregation-mode": "prefill"}
    sizes = {"--kv-offload-host-gb": "70.1", "--max-running-requests": "7"}
    assert decode == path | sizes | {"--port": "30001", "--disaggregation-mode": "decode"}
    keys = '{"digest": "minmax", "step_log": "x"}'
    given = {"config": keys, "budget_tokens": 2048, "gpu_gib": 80, "mem_fraction": 0.9}
    given |= {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}
    prefill, decode, _ = launched(as_text(plan_of(folder, host_gib=400, **given)))
    assert prefill["--kv-offload-config"] == '{"digest": "minmax"}', "only what is for both"
    assert decode["--kv-offload-config"] == keys and decode["--base-gpu-id"] == "1"
    assert (decode["--kv-offload-budget"], decode["--mem-fraction-static"]) == ("2048", "0.9")
    assert "--mem-fraction-static" not in prefill
    for server in prefill, decode:
        assert (server["--dtype"], server["--kv-cache-dtype"]) == ("bfloat16", "fp8_e4m3")
    _, paper, _ = launched(as_text(plan_of(folder, host_gib=400, config='{"paper": true}')))
    assert paper["--kv-offload-recall-profile"] == "PROFILE.json"


def test_a_context_beyond_the_models(model):
    trained = {"max_position_embeddings": 40960, "rope_theta": 1e6}
    for server in launched(as_text(plan_of(model(**trained), host_gib=400)))[:2]:
        asked = json.loads(server["--json-model-override-args"])
        assert asked["max_position_embeddings"] == LONG
        yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}
        assert asked["rope_parameters"] == {"rope_theta": 1e6} | yarn
    assert "--json-model" not in as_text(plan_of(model(**trained), 40960, host_gib=400))
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(
        ConfigError, match="--context 65536: .* 40960, .*; give at most --context 4"
    ):
        plan_of(model(**trained, **scaled), host_gib=400)


def test_the_programs_take_the_commands_that_it_prints(tiny_model, tmp_path):
    keys = {"config": '{"digest": "minmax", "recall": "off"}', "budget_tokens": 64, "gpu_gib": 80}
    folder, commands = tiny_model("qwen3"), {}
    longest = read_model(folder, "auto").max_context_tokens
    for context, more in (64, {}), (2 * longest, keys | {"mem_fraction": 0.8}):
        text = as_text(make_plan(folder, context_tokens=context, host_gib=8, **more))
        commands |= {f"{context} {i}": program(words) for i, words in enumerate(of_shell(text))}
    outcome, said = parsed(commands, folder, tmp_path)
    assert outcome == dict.fromkeys(commands, ""), said
    assert len(commands) == 6


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face Hub as answers for files of models: own/model, own/gated, own/bare, own/down."""

    config = b""

    def do_GET(self):  # noqa: N802
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization")))
        name, _, file = self.path.removeprefix("/").partition("/resolve/main/")
        index = json.dumps({"metadata": {"total_size": 2**35}, "weight_map": {}}).encode()
        files = {"config.json": self.server.config, "model.safetensors.index.json": index}
        wrong = {"own/gated": (403, "GatedRepo"), "own/bare": (404, "EntryNotFound")}
        code, error = wrong.get(name, (401, "RepoNotFound"))
        if name == "own/down":
            code, error = 500, "Down"
        body = files.get(file, b"") if name == "own/model" else b""
        self.send_response(200 if body else code)
        headers = {"ETag": f'"{file}"', "X-Repo-Commit": "a" * 40} if body else {}
        for key, value in (headers or {"X-Error-Code": error}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(model):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.config, server.asked = (model() / "config.json").read_bytes(), []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def plans(names, tmp_path, **environment):
    """Text and error of the plan for each, in a process with these variables, which the Hub's client reads at start."""
    code = "import sys; from sglang_scout.cli import main\nfor name in sys.argv[1:]:\n"
    code += "    main(['plan', name, '--context', '65536', '--host-gb', '400'])"
    settings = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=os.environ | settings | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.stdout, done.stderr.splitlines()


def test_a_name_of_the_hub(hub, tmp_path):
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    names = "own/model own/gated own/none own/bare own/down".split()
    said, errors = plans(names, tmp_path, HF_ENDPOINT=endpoint, HF_TOKEN="hf_secret")
    assert "39 requests of 65,536 tokens" in said and "--model-path own/model " in said
    assert "32.00 GiB (from model.safetensors.index.json)" in said
    paths = [path for _, path, _ in hub.asked]
    assert not [path for path in paths if path.endswith(".safetensors")], "no weights"
    assert {token for _, path, token in hub.asked if "resolve" in path} == {"Bearer hf_secret"}
    words = [
        f"the model is gated; accept its terms at {endpoint}/own/gated, and set HF_TOKEN",
        f"no such folder, and no public model at {endpoint}; check the name, or set HF_TOKEN",
        f"the model at {endpoint} has no config.json; give one that transformers loads",
        f"cannot be downloaded from {endpoint}: Server error '500",
    ]
    assert len(errors) == len(words), errors
    for name, text, error in zip(names[1:], words, errors, strict=True):
        assert error.startswith(f"sglang-scout: plan: --model-path {name}: ") and text in error
    count = len(hub.asked)
    offline = partial(plans, tmp_path=tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    said, errors = offline(["own/model", "own/other"])
    assert "39 requests of 65,536 tokens" in said and len(hub.asked) == count, "from the cache"
    assert "unset the `HF_HUB_OFFLINE` environment variable; try again" in errors[0]


def test_a_shape_without_any_file(model):
    named = read_model(str(model()), "auto")
    plan = make_plan(shape=SHAPE, context_tokens=LONG, host_gib=400, gpu_gib=80)
    assert (plan.requests, plan.stock["requests"]) == (39, 4)
    assert plan.server.model.query_parameters == named.query_parameters
    assert math.isclose(plan.server.model.weight_bytes, named.weight_bytes, rel_tol=0.01)
    assert "--model-path MODEL" in as_text(plan)


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
    said = capsys.readouterr().out
    assert "No step is predicted" in said and "\n    salience  " in said


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
    for name in f"{tmp_path}/no", "./no", "no/such/model":
        with pytest.raises(ConfigError, match=f"--model-path {name}: there is no such folder"):
            read_model(name, "auto")
    with pytest.raises(ConfigError, match=f"--model-path {tmp_path}: cannot read config.json"):
        read_model(str(tmp_path), "auto")


KEYS = "--kv-offload-config"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "1000"], "--kv-offload-budget 1000: must be a positive multiple"),
        (["--context-tokens", "9" * 400], "--context-tokens 999"),
        (
            ["--requests", "65537"],
            "--requests 65537: out of range; give more than 0 and at most 65536",
        ),
        (["--host-gb", "nan"], "--host-gb nan"),
        (["--mem-fraction-static", "0"], "--mem-fraction-static 0.0: out of range"),
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


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (SHAPE.replace("hidden", "size"), "unknown or missing: hidden, size; write for example"),
        ("layers=40", f"heads, hidden, kv_heads, parameters; write for example --shape {SHAPE}"),
        (SHAPE.replace("14.8e9", "14B"), "could not convert string to float: '14B'; write"),
        (SHAPE.replace("14.8e9", "inf"), "cannot convert float infinity to integer; write"),
        (SHAPE.replace("kv_heads=8", "kv_heads=3"), "kv_heads no divisor of heads; write"),
        (SHAPE.replace("layers=40", "layers=0"), "out of range, or"),
        (SHAPE.replace("=128", "=80"), "K has head size 80"),
        (SHAPE, "--shape needs a context; add for example --context 65536"),
    ],
)
def test_wrong_shapes(capsys, shape, words):
    assert main(["plan", "--shape", shape]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_one_model_is_named(model, capsys):
    for words in [], [str(model()), "--shape", SHAPE], [str(model()), "--model-path", "x"]:
        with pytest.raises(SystemExit):
            main(["plan", *words])
    assert "one of the arguments MODEL --model-path --shape is required" in capsys.readouterr().err
