"""Flags on the real ``ServerArgs``: accepted, validated, and invisible when not used.

In a child process: installing the plugin changes SGLang's class permanently, and SGLang takes half a minute to import.
"""

import json
import multiprocessing
import os
import runpy
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from page_weights import forecast_weights, pilot_weights
from servers.pd_cluster import flags
from sglang_scout.cli.sizes import read_model
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.forecast import save_weights
from sglang_scout.core.profile import ModelIdentity, RecallProfile, config_digest, save_profile
from sglang_scout.plugin.hooks import hooks_of

ONE_CPU = str(min(os.sched_getaffinity(0)))


def keys(**config):
    return {"kv_offload_config": json.dumps(config)}


def cuda(**arguments):
    return {"device": "cuda", **arguments}


OWN_PROFILE = {"kv_offload_recall_profile": "OWN", "kv_offload_budget": 128}
PREFILL = {"disaggregation_mode": "prefill"}
PREFILL_GRAPHS = cuda(cuda_graph_config={"prefill": {"backend": "full"}})
NO_GRAPHS = {"cuda_graph_config": {"decode": {"backend": "disabled"}}}
DETERMINISTIC = {"enable_deterministic_inference": True}
SPARDA = {"kv_offload": "sparda", "kv_offload_config": "FORECAST"}
RHEO = {"kv_offload": "rheo", "kv_offload_config": "PILOT"}
SYSTEMS = [SPARDA, RHEO, {"kv_offload": "infinigen"}, {"kv_offload": "hgca"}]
# name: (arguments, parts of the refusal; none: accepted). Refusals of core: test/core/test_flags.py.
CASES = {
    "decode": ({}, ""),
    "prefill": (PREFILL, ""),
    "memory": ({"kv_offload_host_gb": 1e6}, "--kv-offload-host-gb 1e+06: only | GiB | MEMORY_GB=N"),
    "own profile": (OWN_PROFILE, ""),
    "moved model": (OWN_PROFILE | {"model_path": "MOVED"}, ""),
    "budget of profile": (OWN_PROFILE | {"kv_offload_budget": 256}, "budget of 128 | --kv-offload-budget 256"),
    "model of profile": (OWN_PROFILE | {"model_path": "THETA"}, "-recall-profile | own.json | 'tiny' | THETA"),
    "paper": (OWN_PROFILE | keys(paper=True), ""),
    "paper by the constant": (keys(paper=True, recall_interval=4), "paper = True | -recall-profile | `sglang-scout"),
    "paper, to be profiled": (keys(paper=True, recall="off"), ""),
    "paper on the prefill server": (keys(paper=True) | PREFILL, ""),
    "budget of the paper": (OWN_PROFILE | keys(paper=True) | {"kv_offload_budget": None}, "of 128 | -budget 2048"),
    "config in a file": ({"kv_offload_config": "FILE"}, ""),
    "absent layer": (keys(exact_layers=[4]), "--kv-offload-config | exact_layers = [4] | layers 0 to 3 | drop the key"),
    "unwritable step log": (keys(step_log="/proc/x"), "step_log = '/proc/x' | cannot be written | another file"),
    "unwritten on the prefill server": (keys(step_log="/proc/x") | PREFILL, ""),
    "requests": ({"max_running_requests": 65537}, "--max-running-requests 65537 | 1 to 65536"),
    "fp8 on cuda": (cuda(kv_cache_dtype="fp8_e4m3"), ""),
    "fp8 on cpu": ({"kv_cache_dtype": "fp8_e4m3"}, ""),
    "fp4": ({"kv_cache_dtype": "fp4_e2m1"}, "--kv-cache-dtype fp4_e2m1 | auto, fp8_e4m3 or fp8_e5m2"),
    "spec": ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE | one query per request | drop one"),
    "hicache": (PREFILL | {"enable_hierarchical_cache": True}, "--enable-hierarchical-cache True | GPU"),
    "unchecked requests": ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 2 | the request checks | drop one"),
    "unchecked parameters": ({"preferred_sampling_params": {"top_k": 2**40}}, "{'top_k' | after its checks | drop one"),
    "cut prompts": (PREFILL | {"allow_auto_truncate": True}, "--allow-auto-truncate True | its own limit | drop one"),
    "longest folder for sockets": ({"TMPDIR": 95}, ""),
    "too long a folder for sockets": ({"TMPDIR": 96}, "TMPDIR=/ | 96 bytes | 107 | at most 95"),
    "mode": ({"disaggregation_mode": "null"}, "--disaggregation-mode | null | decode"),
    "page": ({"page_size": 16}, "--page-size | 16 | 32"),
    "ranks": ({"tp_size": 2}, ""),
    "too few cpus": ({"tp_size": 2, "kv_offload_cpus": ONE_CPU}, "--kv-offload-cpus | --tp-size | at least 2"),
    "host transport on cuda": (cuda(**keys(transport="host")), "--kv-offload-config | transport | --device cpu"),
    "graph transport on cpu": (keys(transport="graph"), "transport = 'graph' | --device cpu | TRITON_INTERPRET"),
    "hidden states on cuda": (cuda(enable_return_hidden_states=True), "--enable-return-hidden-states | --device cpu"),
    "graphs never replayed": (cuda(disable_cuda_graph_padding=True), "--disable-cuda-graph-padding | drop the flag"),
    "verify on cuda": (cuda(**keys(verify=True)), "verify = true needs --cuda-graph-backend-decode disabled"),
    "verify on cuda without graphs": (cuda(**keys(verify=True), **NO_GRAPHS), ""),
    "prefill graphs in JSON": (PREFILL_GRAPHS, "--cuda-graph-backend-prefill full | set it to disabled"),
    "graphs in pieces": (cuda(cuda_graph_backend_decode="breakable"), "backend-decode breakable | full or disabled"),
    "graphs for debugging": (cuda(debug_cuda_graph=True), "--debug-cuda-graph | --cuda-graph-backend-decode disabled"),
    "weights in host memory": (cuda(cpu_offload_gb=4), "--cpu-offload-gb 4 | --tp-size instead | drop one"),
    "weights in host memory, where all is": ({"cpu_offload_gb": 4}, ""),
    "deterministic": (cuda(**DETERMINISTIC), "--enable-deterministic-inference True | other requests | drop one"),
    "deterministic on cpu": (DETERMINISTIC | PREFILL, "deterministic-inference True | on a CPU | drop the flag"),
    "noise over a transfer": (keys(dummy_kv=True), "dummy_kv | --disaggregation-transfer-backend fake"),
    "noise without one": (keys(dummy_kv=True) | {"disaggregation_transfer_backend": "fake"}, ""),
    "backend": ({"attention_backend": "flashinfer"}, "--attention-backend | torch_native"),
    "transfer": ({"disaggregation_transfer_backend": "nixl"}, "transfer-backend nixl | expects all KV on a GPU"),
    "stray": ({"kv_offload": "none", "kv_offload_budget": 64}, "--kv-offload-budget | 64"),
    "gemma": ({"model_path": "GEMMA"}, "--model-path | Gemma2ForCausalLM | sliding-window | Qwen3ForCausalLM"),
    "window": ({"model_path": "WINDOW"}, "--model-path | sliding-window"),
    "mistral's own window": ({"model_path": "MISTRAL_WINDOW"}, "--model-path | sliding-window"),
    "mistral": ({"model_path": "MISTRAL"}, ""),
    "head size": ({"model_path": "HEADS"}, "--model-path | head size 48 | 64"),
    "quantised checkpoint": ({"model_path": "QUANT"}, ""),
    "checksums": (keys(page_checksums=True), ""),
    **{x["kv_offload"]: (x, "") for x in SYSTEMS},
    **{f"checksums, {x['kv_offload']}": (x | keys(page_checksums=True), "page_checksums | for scout") for x in SYSTEMS},
    "model of forecast": (SPARDA | {"model_path": "THETA"}, "forecast_file = | own_forecast' | THETA | --kind"),
    "model of pilot": (RHEO | {"model_path": "THETA"}, "pilot_file = | own_pilot' | THETA | --kind pilot"),
    "no forecast": ({"kv_offload": "sparda"}, "sparda: needs --kv-offload-config | forecast_file | --kind forecast"),
    "no window": ({"kv_offload": "hgca", "kv_offload_budget": 32}, "--kv-offload-budget 32 | at least 64"),
}  # fmt: skip
if version("sglang") != "0.5.15.post1":
    E4M3, CHECKSUMS = {"kv_cache_dtype": "fp8_e4m3"}, "disaggregation_enable_kv_checksum"
    COPIES = "disaggregation_decode_retraction_backup"
    CASES |= {
        "fp8 on cpu": (E4M3, "--kv-cache-dtype fp8_e4m3 | on a CPU | torch_native | drop the flag"),
        "copies in another pool": ({COPIES: "host_pool"}, "backup host_pool: not supported"),
        "checksums of SGLang": ({CHECKSUMS: True}, "True: not supported | page_checksums in"),
    }


SEEN = "page_size attention_backend decode_attention_backend max_running_requests kv_offload_config"


SET = {
    "SGLANG_TIMEOUT_KEEP_ALIVE": "120",
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""What the flag sets in the environment, with --device cpu."""


def seen(made):
    role = os.environ.pop("SGLANG_SCOUT_ROLE", None)
    return {name: getattr(made, name) for name in SEEN.split()} | {"role": role}


def use_tmpdir(size, folder):
    """A folder with a path of ``size`` bytes; 0: the usual one."""
    tempfile.tempdir = None
    os.environ.pop("TMPDIR", None)
    if size:
        os.environ["TMPDIR"] = path = f"{folder}/".ljust(size, "t")
        os.makedirs(path, exist_ok=True)


def serve_flags(cases, model, folder):
    """The result of each case, and of a command line, as files in ``folder``."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    sys.stderr = open(folder / "stderr", "w")
    for name in ("SGLANG_SCOUT_ROLE", "TRITON_INTERPRET", *SET):  # some are set by the unit tests
        os.environ.pop(name, None)
    load_plugins()
    from sglang.srt.server_args import ServerArgs

    from sglang_scout.plugin.hooks import adapter

    def resolved(**given):
        """SGLang's resolved flags, resolved at once or on request."""
        made = ServerArgs(**given)
        getattr(made, "resolve_once", lambda: None)()
        return adapter.resolved(made)

    common = {"model_path": model, "device": "cpu", "disaggregation_mode": "decode"}
    facts = seen(resolved(**common))
    hooks = HookRegistry._hooks
    facts["patched"] = sorted(t for t in HookRegistry._patched if "scout" in str(hooks[t]))
    facts["set"] = [[os.environ.get(name) for name in SET]]
    results = []
    for given in cases:
        given = common | {"kv_offload": "scout"} | given
        use_tmpdir(given.pop("TMPDIR", 0), folder)
        try:
            results.append(["accepted", seen(resolved(**given))])
        except Exception as error:
            results.append([repr(type(error).__mro__[-4:-1]), str(error)])
    os.environ.pop("SGLANG_SCOUT_ROLE", None)
    facts["set"].append([os.environ[name] for name in SET])
    (folder / "results.json").write_text(json.dumps([results, facts]))
    sys.argv = ["launch_server", *flags(**common, kv_offload="scout", kv_offload_budget=33)]
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # not reached in a child process
        sys.exit(1)


ABSENT = "absent"


def _variant(source: Path, target: Path, **changes) -> str:
    """A model folder with a modified config; weights are not read before the refusal."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text()) | changes
    given = {key: value for key, value in config.items() if value != ABSENT}
    (target / "config.json").write_text(json.dumps(given))
    return str(target)


NO_WINDOW = {"use_sliding_window": ABSENT, "layer_types": ABSENT}
MISTRAL = NO_WINDOW | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 0}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
MODELS = {
    "GEMMA": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
    "WINDOW": QWEN2 | {"use_sliding_window": True, "sliding_window": 64},
    "MISTRAL_WINDOW": MISTRAL | {"sliding_window": ABSENT},
    "MISTRAL": MISTRAL | {"sliding_window": None},
    "HEADS": {"head_dim": 48},
    "QUANT": {"quantization_config": AWQ},
    "MOVED": {"transformers_version": "4.0"},
    "THETA": {"rope_theta": 12345.0},
}


@pytest.fixture(scope="module")
def outcome(tiny_model, tmp_path_factory):
    """Results by case, metadata of a server without the flag, model folders, the end of stderr."""
    model, folder = tiny_model("qwen3"), tmp_path_factory.mktemp("models")
    paths = {name: _variant(model, folder / name, **changes) for name, changes in MODELS.items()}
    profile = folder / "own.json"
    own = json.loads((model / "config.json").read_text())
    identity = ModelIdentity("Qwen3ForCausalLM", 4, 4, 2, 64, config_digest(own))
    own_profile = RecallProfile(1, "tiny", 32, 128, 0.12, [8] * 4, 4, identity=identity)
    save_profile(own_profile, str(profile))
    (folder / "config.json").write_text('{"recall": "fixed"}')
    named = paths | {"OWN": str(profile), "FILE": f"@{folder}/config.json"}
    forecast = forecast_weights(identity, own["hidden_size"])
    for kind, weights in (("forecast", forecast), ("pilot", pilot_weights(identity))):
        save_weights(weights, str(folder / f"own_{kind}"))
        named[kind.upper()] = json.dumps({f"{kind}_file": str(folder / f"own_{kind}")})
    cases = [
        {"model_path": str(model)} | {key: named.get(str(x), x) for key, x in given.items()}
        for given, _ in CASES.values()
    ]
    # Not forked: with leftover threads of other tests, that may crash.
    spawn = multiprocessing.get_context("spawn")
    given = __file__, {"GIVEN": (cases, str(model), folder)}, serve_flags.__name__
    child = spawn.Process(target=runpy.run_path, args=given, daemon=True)
    child.start()
    child.join(240)
    log = (folder / "stderr").read_text()
    assert child.exitcode == 1, log[-4000:]
    results, facts = json.loads((folder / "results.json").read_text())
    by_case = dict(zip(CASES, results, strict=True))
    return SimpleNamespace(cases=by_case, facts=facts, paths=paths, last_line=log.splitlines()[-1])


@pytest.mark.parametrize(("name", "parts"), [(n, p) for n, (_, p) in CASES.items() if p])
def test_refused(outcome, name, parts):
    kind, message = outcome.cases[name]
    assert "ValueError" in kind, (kind, message)
    for part in parts.split(" | "):
        assert part in message


def test_accepted_with_the_implied_defaults(outcome):
    for name, given in ((n, given) for n, (given, parts) in CASES.items() if not parts):
        kind, made = outcome.cases[name]
        assert kind == "accepted", made
        on_cpu = given.get("device", "cpu") == "cpu"
        assert made["page_size"] == 32
        assert (made["attention_backend"] == "torch_native") == on_cpu
        assert json.loads(made["role"])[0] == ("prefill" if "prefill" in name else "decode")
        assert made["decode_attention_backend"] == (None if "prefill" in name else "scout")
    made = outcome.cases["config in a file"][1]
    assert json.loads(made["kv_offload_config"]) == {"recall": "fixed"}, (
        "read once, by the launcher"
    )


@pytest.mark.parametrize(
    ("name", "path", "parts"),
    [(n, g["model_path"], p) for n, (g, p) in CASES.items() if "model_path" in g and len(g) == 1],
)
def test_the_plan_refuses_the_models_that_the_server_refuses(outcome, name, path, parts):
    """From config.json only; for the server transformers fills in absent keys."""
    assert (outcome.cases[name][0] == "accepted") == (not parts)
    if parts:
        with pytest.raises(ConfigError, match="--model-path"):
            read_model(outcome.paths[path], "auto")
    elif path != "QUANT":  # its plan needs the files
        assert read_model(outcome.paths[path], "auto").head_dim == 64


def test_without_the_flag_sglang_is_as_it_was(outcome):
    facts = outcome.facts
    assert facts["page_size"] == 1
    unset = "role", "decode_attention_backend", "max_running_requests"
    assert [facts[name] for name in unset] == [None] * 3
    assert facts["set"] == [[None] * len(SET), list(SET.values())], "without the flag, and with it"
    targets = (hook.target_here for hook in hooks_of("flags"))
    assert facts["patched"] == sorted(f"sglang.srt.{target}" for target in targets if target)


def test_the_command_line_ends_with_the_refusal_and_no_trace(outcome):
    assert outcome.last_line.startswith("sglang-scout: --kv-offload-budget 33: ")


if __name__ == serve_flags.__name__:  # the child process
    serve_flags(*globals()["GIVEN"])
