"""SGLang flags that are incompatible with ``--kv-offload``."""

from __future__ import annotations

from typing import Any

from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import get_device

from sglang_scout.core.config import PAGE_SIZE_TOKENS, OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.files import check_socket_folder
from sglang_scout.core.served_models import FP8_KV
from sglang_scout.plugin.line import VERSION, adapter
from sglang_scout.worker.host_memory import LAST_RESORT, available_bytes, free_pool_bytes
from sglang_scout.worker.settings import check_machine
from sglang_scout.worker.spec import MAX_BATCH

BACKEND_NAME = "scout"
# Fields of ServerArgs and their required values.
_UNSUPPORTED: dict[str, Any] = {
    "speculative_algorithm": None,
    "nnodes": 1,
    "pp_size": 1,
    "dp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "enable_dp_attention": False,
    "enable_attn_tp_input_scattered": False,
    "moe_dense_tp_size": None,
    "moe_a2a_backend": "none",
    "ep_size": 1,
    "enable_lora": None,
    "lora_paths": None,
    "enable_hierarchical_cache": False,
    "disaggregation_decode_enable_offload_kvcache": False,
    "enable_hisparse": False,
    "enable_pdmux": False,
    "enable_two_batch_overlap": False,
    "enable_unified_memory": False,
    "enable_page_major_kv_layout": False,
    "enable_torch_compile": False,
    "kv_canary": "none",
    "model_impl": "sglang",
    "tokenizer_worker_num": 1,
    "allow_auto_truncate": False,
    "preferred_sampling_params": None,
    "grpc_mode": False,
    "use_ray": False,
    # In some releases only.
    "attn_dp_size": 1,
    "disaggregation_decode_allocation_policy": "early",
    "disaggregation_decode_host_receive_threshold": 1.0,
    "disaggregation_decode_retraction_backup": "cpu_tensor",
    "disaggregation_enable_kv_checksum": False,
    "enable_kv_cache_sharding": False,
    "enable_layernorm_sp": False,
    "enable_nvidia_megakernel": False,
    "enable_pd_role_switch": False,
    "enable_prefill_cp": False,
    "smg_grpc_mode": False,
}
_WHOLE_INPUTS = ": queries are predicted from layer inputs, so every rank needs the whole input"
_ONE_PART = (
    ": CPU attention needs all pages of a request in this server's memory; use --tp-size instead"
)
_ONE_REPLICA = ": start a server for each replica, behind one router"
_UNCHECKED = (
    ": it bypasses the request checks, without which a malformed request would end the scheduler"
)
_LORA = (
    ": queries are predicted from the base model's weights, and adapters are untested because SGLang has no LoRA on a "
    "CPU; merge the adapter into the weights"
)
_NIXL = (
    ". SGLang's NIXL backend expects all KV on a GPU, and on 0.5.15.post1 a request that ends during its transfer "
    "stops all others"
)
_WHY = {
    "speculative_algorithm": ": a decode step has one query per request, but drafts have several tokens, and the KV of "
    "rejected ones would have to be removed",
    "nnodes": _ONE_PART,
    "pp_size": _ONE_PART,
    "attn_cp_size": _ONE_PART,
    "dcp_size": _ONE_PART,
    "dp_size": _ONE_REPLICA,
    "attn_dp_size": _ONE_REPLICA,
    "enable_dp_attention": _ONE_REPLICA,
    "enable_attn_tp_input_scattered": _WHOLE_INPUTS,
    "enable_layernorm_sp": _WHOLE_INPUTS,
    "moe_dense_tp_size": _WHOLE_INPUTS,
    "moe_a2a_backend": _WHOLE_INPUTS,
    "ep_size": ": it is untested; --tp-size also divides the experts",
    "enable_lora": _LORA,
    "lora_paths": _LORA,
    "enable_hierarchical_cache": ": the decode server already keeps all KV in host memory; on the prefill server it "
    "needs a GPU and is untested",
    "disaggregation_decode_enable_offload_kvcache": ": all KV is already in host memory",
    "enable_hisparse": ": both choose which KV is attended to",
    "enable_two_batch_overlap": ": it runs the halves of a batch alternately, but the hooks expect one batch per step",
    "model_impl": ": the hooks need SGLang's own layers",
    "tokenizer_worker_num": _UNCHECKED,
    "grpc_mode": _UNCHECKED,
    "smg_grpc_mode": _UNCHECKED,
    "use_ray": ": its schedulers do not load plugins",
    "preferred_sampling_params": ": they are added to a request after its checks; let clients send them",
    "allow_auto_truncate": ": each server of a pair would truncate a long prompt at its own limit, so the two would "
    "disagree",
    "disaggregation_enable_kv_checksum": ": its CUDA kernels check everything that is sent, also digests and hints, "
    "which only some pages have; use page_checksums in --kv-offload-config, which finds KV that changes in host memory",
    "kv_canary": ": its CUDA kernels check only SGLang's own pools on the device, and its tags would be sent in front "
    "of K, where K, V and digests are told apart by position; use page_checksums in --kv-offload-config, which finds "
    "KV that changes in host memory",
}


def flag_of(name: str) -> str:
    """The flag of a field of ``ServerArgs``."""
    return "--" + name.replace("_", "-")


def device_of(args: ServerArgs) -> str:
    """The device that SGLang will choose, before it has set the field."""
    return str(args.device or get_device())


def on_cpu(args: ServerArgs) -> bool:
    return device_of(args) == "cpu"


def check_deployment(args: ServerArgs, config: OffloadConfig) -> None:
    """Refuse what this version does not support."""
    policy = f"--kv-offload {args.kv_offload}"
    if args.disaggregation_mode not in ("prefill", "decode"):
        raise ConfigError(
            f"{policy}: works only on the servers of a prefill-decode pair, but this one has "
            f"--disaggregation-mode {args.disaggregation_mode}; set it to prefill or decode"
        )
    if args.page_size not in (None, PAGE_SIZE_TOKENS):
        raise ConfigError(
            f"--page-size {args.page_size}: {policy} uses pages of {PAGE_SIZE_TOKENS} tokens; "
            f"drop the flag or set it to {PAGE_SIZE_TOKENS}"
        )
    if args.kv_cache_dtype not in ("auto", *FP8_KV):
        raise ConfigError(
            f"--kv-cache-dtype {args.kv_cache_dtype}: {policy} keeps KV in the model's dtype (auto) or in "
            f"fp8; set it to auto, {' or '.join(FP8_KV)}, on both servers"
        )
    backends = ("mooncake", "mooncake_tcp", "fake")
    if args.disaggregation_transfer_backend not in backends:
        raise ConfigError(
            f"--disaggregation-transfer-backend {args.disaggregation_transfer_backend}: not supported with {policy}; "
            f"choose one of {', '.join(backends)}{_NIXL if args.disaggregation_transfer_backend == 'nixl' else ''}"
        )
    for name, fine in _UNSUPPORTED.items():
        value = getattr(args, name, fine)
        if value not in (fine, "auto") and value:
            raise ConfigError(
                f"{flag_of(name)} {value}: not supported with {policy}{_WHY.get(name, '')}; drop one of the two"
            )
    if config.dummy_kv and args.disaggregation_transfer_backend != "fake":
        raise ConfigError(
            "--kv-offload-config: dummy_kv = true overwrites what a prefill server sends; drop it, or "
            "set --disaggregation-transfer-backend fake"
        )
    if config.cpus is not None and len(config.cpus) < args.tp_size:
        raise ConfigError(
            f"--kv-offload-cpus {args.kv_offload_cpus!r}: fewer CPUs than the {args.tp_size} ranks of --tp-size, each "
            f"of which has a CPU attention process; name at least {args.tp_size}, or drop the flag"
        )
    check_socket_folder()
    _check_memory(config)
    if args.disaggregation_mode == "decode":
        check_machine()
        _check_decode(args, policy)
    if on_cpu(args):
        _check_cpu_device(args, policy)


def _check_cpu_device(args: ServerArgs, policy: str) -> None:
    if args.enable_deterministic_inference:
        # SGLang's message would name an attention backend that was not given.
        raise ConfigError(
            "--enable-deterministic-inference True: SGLang has no attention backend for it on a CPU; "
            "drop the flag"
        )
    if args.kv_cache_dtype not in ("auto", *adapter.FP8_ON_CPU):
        raise ConfigError(
            f"--kv-cache-dtype {args.kv_cache_dtype}: SGLang {VERSION} does not support fp8 KV on a CPU with the "
            f"attention backend torch_native, which {policy} needs there; drop the flag on both servers"
        )
    for name in ("attention_backend", "prefill_attention_backend"):
        if (value := getattr(args, name)) not in (None, "torch_native"):
            raise ConfigError(
                f"{flag_of(name)} {value}: on a CPU {policy} needs torch_native; drop the flag"
            )


def _check_decode(args: ServerArgs, policy: str) -> None:
    requests = args.max_running_requests
    if requests is not None and not 1 <= requests <= MAX_BATCH:
        raise ConfigError(
            f"--max-running-requests {requests}: {policy} serves 1 to {MAX_BATCH} requests at once; choose a "
            "number in this range"
        )
    if args.decode_attention_backend not in (None, BACKEND_NAME):
        raise ConfigError(
            f"--decode-attention-backend {args.decode_attention_backend}: {policy} has its own backend; "
            f"drop the flag or set it to {BACKEND_NAME}"
        )
    for name in ("enable_deterministic_inference", "rl_on_policy_target"):  # which implies it
        if value := getattr(args, name):
            raise ConfigError(
                f"{flag_of(name)} {value}: with {policy} the other requests of a batch decide which pages of a request "
                "are on the device, and so in which order its attention is summed; drop the flag, or serve without "
                "--kv-offload"
            )


def _check_memory(config: OffloadConfig) -> None:
    free_gb = max(available_bytes(), free_pool_bytes()) / 2**30
    if config.host_gb is not None and config.host_gb > free_gb:
        raise ConfigError(
            f"--kv-offload-host-gb {config.host_gb:g}: only {free_gb:.1f} GiB of host memory are available; lower the "
            f"flag, or free memory; {LAST_RESORT}"
        )
