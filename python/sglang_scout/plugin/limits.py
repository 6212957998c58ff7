"""What a server with ``--kv-offload`` refuses at its start: flags, machine and model. Requests: ``http.py``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import get_device

from sglang_scout.core import flags
from sglang_scout.core.config import PAGE_SIZE_TOKENS, OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import DTYPES, FP8_KV
from sglang_scout.core.forecast import check_weights
from sglang_scout.core.profile import check_profile, load_profile
from sglang_scout.ops import triton
from sglang_scout.ops.select import MAX_COLUMNS
from sglang_scout.plugin.hooks import VERSION, adapter
from sglang_scout.plugin.model import TORCH_DTYPES, model_identity
from sglang_scout.policy import Context, make_policy
from sglang_scout.worker.host_memory import LAST_RESORT, available_bytes, free_pool_bytes
from sglang_scout.worker.ring import MAX_BATCH

BACKEND_NAME = "scout"
TRANSFER_BACKENDS = ("mooncake", "mooncake_tcp", "fake")
_NIXL = ". SGLang's NIXL backend expects all KV on a GPU"

# Fields of ServerArgs, some of them in some releases only, that must keep SGLang's default, and why.
_KEPT = {
    "disaggregation_decode_allocation_policy disaggregation_decode_host_receive_threshold "
    "disaggregation_decode_retraction_backup enable_kv_cache_sharding enable_nvidia_megakernel "
    "enable_page_major_kv_layout enable_pd_role_switch enable_pdmux enable_prefill_cp "
    "enable_torch_compile enable_unified_memory": "",
    "nnodes pp_size attn_cp_size dcp_size": ": one server has all pages of a request; use --tp-size instead",
    "dp_size attn_dp_size enable_dp_attention": ": start a server for each replica, behind one router",
    "enable_attn_tp_input_scattered enable_layernorm_sp moe_dense_tp_size moe_a2a_backend": ": every rank needs the "
    "whole input of a layer",
    "tokenizer_worker_num grpc_mode smg_grpc_mode": ": it bypasses the request checks",
    "enable_lora lora_paths": ": queries are predicted from the base model's weights; merge the adapter into these",
    "speculative_algorithm": ": a decode step has one query per request, but drafts have several tokens",
    "ep_size": ": it is untested; --tp-size also divides the experts",
    "enable_hierarchical_cache": ": the decode server keeps all KV in host memory; on the other it needs a GPU",
    "disaggregation_decode_enable_offload_kvcache": ": all KV is already in host memory",
    "enable_hisparse": ": both choose which KV is attended to",
    "enable_two_batch_overlap": ": it runs the halves of a batch alternately, but the hooks expect one batch per step",
    "model_impl": ": the hooks need SGLang's own layers",
    "use_ray": ": its schedulers do not load plugins",
    "preferred_sampling_params": ": they are added to a request after its checks; let clients send them",
    "allow_auto_truncate": ": each server of a pair would truncate a long prompt at its own limit",
    "disaggregation_enable_kv_checksum kv_canary": ": use page_checksums in --kv-offload-config instead",
}
_AS_GOOD = ("auto", "sglang", "cpu_tensor")  # of --model-impl and of ...-retraction-backup
# The same on a decode server, and on one on a CUDA device.
_KEPT_ON_DECODE = {
    "enable_deterministic_inference rl_on_policy_target": ": other requests decide in which order attention is summed",
}
_KEPT_ON_CUDA = {
    "cpu_offload_gb offload_group_size": ": weights must be on the device; spread them with --tp-size instead",
    # SGLang runs it in pieces, and fails if the graphs are not piecewise.
    "debug_cuda_graph": ": a decode step is one CUDA graph or none; set --cuda-graph-backend-decode disabled instead",
}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse(args: ServerArgs, name: str, why: str) -> NoReturn:
    raise ConfigError(f"{flag_of(name)} {getattr(args, name)}: {why}")


def _check_kept(args: ServerArgs, kept: dict[str, str]) -> None:
    for names, why in kept.items():
        for name in names.split():
            value = getattr(args, name, None)
            if value and value != adapter.default_of(name) and value not in _AS_GOOD:
                raise ConfigError(
                    f"{flag_of(name)} {value}: not supported with --kv-offload {args.kv_offload}{why}; drop one of the "
                    "two"
                )


def device_of(args: ServerArgs) -> str:
    """The device, cpu or cuda, that SGLang will choose, before it has set the field."""
    return torch.device(args.device or get_device()).type


def uses_graph_transport(config: OffloadConfig, device: str) -> bool:
    """Whether the device's stream, not the host, posts to the attention process. ``transport = graph`` does so on the
    CPU device too, with the ring's kernels in Triton's interpreter: slow, for tests."""
    if config.transport != "auto":
        return config.transport == "graph"
    return torch.device(device).type == "cuda"


def check_deployment(args: ServerArgs, config: OffloadConfig) -> None:
    policy = f"--kv-offload {args.kv_offload}"
    if args.disaggregation_mode not in ("prefill", "decode"):
        raise ConfigError(
            f"{policy}: works only on the servers of a prefill-decode pair, but this one has "
            f"--disaggregation-mode {args.disaggregation_mode}; set it to prefill or decode"
        )
    if args.page_size not in (None, PAGE_SIZE_TOKENS):
        why = f"{policy} uses pages of {PAGE_SIZE_TOKENS} tokens; drop the flag or set it to "
        _refuse(args, "page_size", f"{why}{PAGE_SIZE_TOKENS}")
    if args.kv_cache_dtype not in ("auto", *FP8_KV):
        why = f"{policy} keeps KV in the model's dtype (auto) or in fp8; set it to auto, "
        _refuse(args, "kv_cache_dtype", f"{why}{' or '.join(FP8_KV)}, on both servers")
    if (backend := args.disaggregation_transfer_backend) not in TRANSFER_BACKENDS:
        why = f"not supported with {policy}; choose one of {', '.join(TRANSFER_BACKENDS)}"
        _refuse(args, "disaggregation_transfer_backend", why + _NIXL * (backend == "nixl"))
    _check_kept(args, _KEPT)
    if config.dummy_kv and backend != "fake":
        raise ConfigError(
            "--kv-offload-config: dummy_kv = true overwrites what a prefill server sends; drop it, or "
            "set --disaggregation-transfer-backend fake"
        )
    if config.cpus is not None and len(config.cpus) < args.tp_size:
        raise ConfigError(
            f"--kv-offload-cpus {args.kv_offload_cpus!r}: fewer CPUs than the {args.tp_size} ranks of --tp-size, each "
            f"of which has a CPU attention process; name at least {args.tp_size}, or drop the flag"
        )
    flags.check_socket_folder()
    check_memory_flag(config)
    if args.disaggregation_mode == "decode":
        _check_decode(args, config, policy)
    if device_of(args) != "cpu":
        return
    if args.enable_deterministic_inference:
        # SGLang's message would name an attention backend that was not given.
        why = "SGLang has no attention backend for it on a CPU; drop the flag"
        _refuse(args, "enable_deterministic_inference", why)
    if args.kv_cache_dtype not in ("auto", *adapter.FP8_ON_CPU):
        why = f"SGLang {VERSION} does not support fp8 KV on a CPU with the attention backend torch_native, which "
        _refuse(args, "kv_cache_dtype", f"{why}{policy} needs there; drop the flag on both servers")
    for name in ("attention_backend", "prefill_attention_backend"):
        if getattr(args, name) not in (None, "torch_native"):
            _refuse(args, name, f"on a CPU {policy} needs torch_native; drop the flag")


def _check_decode(args: ServerArgs, config: OffloadConfig, policy: str) -> None:
    requests = args.max_running_requests
    if requests is not None and not 1 <= requests <= MAX_BATCH:
        why = f"{policy} serves 1 to {MAX_BATCH} requests at once; choose a number in this range"
        _refuse(args, "max_running_requests", why)
    if args.decode_attention_backend not in (None, BACKEND_NAME):
        why = f"{policy} has its own backend; drop the flag or set it to {BACKEND_NAME}"
        _refuse(args, "decode_attention_backend", why)
    device = device_of(args)
    on_cuda, on_device = device == "cuda", uses_graph_transport(config, device)
    _check_kept(args, _KEPT_ON_DECODE | (_KEPT_ON_CUDA if on_cuda else {}))
    of_transport = f"--kv-offload-config: transport = {config.transport!r}"
    if config.transport == "host" and on_cuda:
        raise ConfigError(f"{of_transport} needs --device cpu; drop the key")
    if on_device and not on_cuda and not triton.interpreted():
        fix = "needs Triton's interpreter; set TRITON_INTERPRET=1, or drop the key"
        raise ConfigError(f"{of_transport} on --device {device} {fix}")
    if on_device and args.enable_return_hidden_states:
        why = "makes SGLang capture CUDA graphs again while it serves; drop the flag, or use --device cpu"
        _refuse(args, "enable_return_hidden_states", why)


def check_resolved_graphs(args: ServerArgs, config: OffloadConfig) -> None:
    """Refuse SGLang's resolved flags and defaults if a step would be neither one graph nor eager."""
    if device_of(args) != "cuda":
        return
    graphs = args.cuda_graph_config
    for phase, fine in (("decode", ("full", "disabled")), ("prefill", ("disabled",))):
        if (backend := getattr(graphs, phase).backend) not in fine:
            raise ConfigError(
                f"--cuda-graph-backend-{phase} {backend}: given, or derived by SGLang from other flags, but a "
                f"decode server with --kv-offload runs a step as one CUDA graph or without graphs, and no prefill; set "
                f"it to {' or '.join(fine)}"
            )
    if graphs.decode.backend == "disabled":
        return
    if args.disable_cuda_graph_padding:
        # It looks up its graphs by the number of requests, but their keys differ.
        why = "with it this SGLang captures a graph for each batch size but replays none; drop the flag, or set "
        why += "--cuda-graph-backend-decode disabled to run without graphs"
        _refuse(args, "disable_cuda_graph_padding", why)
    if config.verify:
        needs = "needs --cuda-graph-backend-decode disabled; set it, or drop the key"
        raise ConfigError(f"--kv-offload-config: verify = true {needs}")


def check_memory_flag(config: OffloadConfig) -> None:
    free_gb = max(available_bytes(), free_pool_bytes()) / 2**30
    if config.host_gb is not None and config.host_gb > free_gb:
        raise ConfigError(
            f"--kv-offload-host-gb {config.host_gb:g}: only {free_gb:.1f} GiB of host memory are available; set it "
            f"below that, or free memory\n  {LAST_RESORT}"
        )


def check_model(server_args: Any, config: OffloadConfig) -> None:
    """Refuse a model that the decode step does not support, or that the files do not match."""
    path = config.recall_profile
    profile = None if path is None else load_profile(path)
    model = f"--model-path {server_args.model_path}"
    served, policy = adapter.model_config(server_args), f"--kv-offload {server_args.kv_offload}"
    flags.check_architecture(model, (served.hf_config.architectures or ["(none named)"])[0])
    if (kind := served.attention_arch.name) != "MHA":
        needs = f"needs MHA or GQA, not {kind}; choose a model with one of these"
        raise ConfigError(f"{model}: {policy} {needs}")
    text = served.hf_text_config
    window = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    sizes = {"head_dim": served.head_dim, "v_head_dim": served.v_head_dim}
    flags.check_attention(model, **sizes, has_window=bool(served.is_hybrid_swa or window))
    if served.dtype not in TORCH_DTYPES:
        fix = f"set --dtype to one of {', '.join(DTYPES)}"
        raise ConfigError(f"{model}: dtype {served.dtype} is not supported with {policy}; {fix}")
    device, pages = device_of(server_args), -(-served.context_len // PAGE_SIZE_TOKENS)
    on_device = uses_graph_transport(config, device)
    if server_args.disaggregation_mode == "decode" and on_device and pages > MAX_COLUMNS:
        raise ConfigError(
            f"--context-length {served.context_len}: {pages} pages of {PAGE_SIZE_TOKENS} tokens, but the device "
            f"kernels select from at most {MAX_COLUMNS}; lower it to {MAX_COLUMNS * PAGE_SIZE_TOKENS}"
        )
    # It refuses unsupported settings.
    weights = make_policy(Context(config, served.num_hidden_layers, 1, profile)).rule.weights
    if weights is None and profile is None:
        return
    of_model = {"identity": model_identity(served), "model": server_args.model_path}
    if weights is not None:
        check_weights(weights, hidden_size=served.hidden_size, **of_model)
    if profile is not None:
        check_profile(profile, path, config=config, **of_model)
