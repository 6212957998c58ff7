"""The server flags: added to SGLang's own ``ServerArgs``, validated, and the defaults that they imply.

The dataclass is extended in place, not replaced, because SGLang and its plugins hold references to it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import psutil
from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.server_args import ServerArgs, add_attention_backend_choices

from sglang_scout.core.config import PAGE_SIZE_TOKENS, OffloadConfig
from sglang_scout.core.config_keys import check_files
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.parse_config import parse_config
from sglang_scout.core.profile import load_profile
from sglang_scout.plugin.device import check_device_engine, check_resolved_graphs
from sglang_scout.plugin.install import ROLE_ENV, announce, launched_as
from sglang_scout.plugin.support import check_model
from sglang_scout.policy.presets import POLICY_NAMES
from sglang_scout.worker.host_memory import available_bytes
from sglang_scout.worker.spec import MAX_BATCH

logger = logging.getLogger(__name__)

BACKEND_NAME = "scout"
DEFAULT_MAX_RUNNING_REQUESTS = 64
_LAUNCHED = launched_as()
PROCESS_CPUS = _LAUNCHED.cpus if _LAUNCHED else frozenset(os.sched_getaffinity(0))
"""As the server was started; SGLang may bind a scheduler process to a NUMA node, and the thread that runs the model
to one CPU."""

# Annotations in the form that SGLang's own fields have: inner type and Arg(help).
_FIELDS: dict[str, tuple[Any, Any]] = {
    "kv_offload": (
        A[
            str,
            Arg(
                help="GPU-CPU co-attention decoding: KV pages live in host memory, the GPU keeps "
                "page digests and the important pages, a CPU worker computes the rest. Give it to "
                "both servers of a prefill-decode pair. Policies: none, "
                + ", ".join(POLICY_NAMES)
                + "."
            ),
        ],
        "none",
    ),
    "kv_offload_budget": (
        A[
            int | None,
            Arg(
                help="Tokens that a request attends to in full pages, per layer and step; a "
                "multiple of 32. Default 2048."
            ),
        ],
        None,
    ),
    "kv_offload_host_gb": (
        A[
            float | None,
            Arg(
                help="Host memory for KV pages, in GiB, over all ranks. Default: half of the memory that is "
                "available when the server starts, but no more than a GPU has room for digests of, "
                "beside resident pages."
            ),
        ],
        None,
    ),
    "kv_offload_recall_profile": (
        A[
            str | None,
            Arg(help="JSON file with per-layer recall intervals, from `sglang-scout profile`."),
        ],
        None,
    ),
    "kv_offload_cpus": (
        A[
            str | None,
            Arg(
                help="CPUs of the attention worker, for example 0-35; where they are of one NUMA "
                "node, the KV pages lie on it. With --tp-size they are dealt out to the workers of "
                "the ranks. Default: those near the GPU, else every CPU of this process."
            ),
        ],
        None,
    ),
    "kv_offload_config": (
        A[
            str | None,
            Arg(help="Rarer settings as a JSON object, or @FILE; see docs/operations.md."),
        ],
        None,
    ),
}


def add_fields() -> None:
    """Insert the fields into the live ``ServerArgs``; its parser then has the flags. Idempotent."""
    for name, (annotation, default) in _FIELDS.items():
        if name in ServerArgs.__dataclass_fields__:
            continue
        field = dataclasses.field(default=default)
        field.name = name
        field.type = annotation
        field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
        field.kw_only = True
        ServerArgs.__dataclass_fields__[name] = field
        ServerArgs.__annotations__[name] = annotation
        setattr(ServerArgs, name, default)
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    if BACKEND_NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND_NAME])


def around_init(original: Callable[..., None], self: ServerArgs, *args: Any, **kwargs: Any) -> None:
    """The generated ``__init__`` does not know the new fields: set them here, pass the rest on."""
    for name, (_, default) in _FIELDS.items():
        setattr(self, name, kwargs.pop(name, default))
    original(self, *args, **kwargs)


def around_post_init(original: Callable[..., None], self: ServerArgs) -> None:
    """Validate before SGLang resolves its own defaults, check the model after it knows it."""
    try:
        _post_init(original, self)
    except ConfigError:
        _print_without_a_trace()
        raise


def _print_without_a_trace() -> None:
    """A refused flag that nobody catches ends the launcher with the sentence, not the way to it."""
    otherwise = sys.excepthook
    if getattr(otherwise, "prints_config_errors", False):
        return

    def print_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, ConfigError):
            print(f"sglang-scout: {error}", file=sys.stderr)
        else:
            otherwise(kind, error, trace)

    print_error.prints_config_errors = True  # type: ignore[attr-defined]
    sys.excepthook = print_error


def _post_init(original: Callable[..., None], self: ServerArgs) -> None:
    if self.kv_offload == "none":
        os.environ.pop(ROLE_ENV, None)
        _refuse_stray_flags(self)
        original(self)
        return
    config = parse(self)
    _check_deployment(self)
    if config.dummy_kv and self.disaggregation_transfer_backend != "fake":
        raise ConfigError(
            "--kv-offload-config: dummy_kv = true overwrites what a prefill server sends; drop it, or "
            "set --disaggregation-transfer-backend fake"
        )
    if self.disaggregation_mode == "decode":
        check_device_engine(self, config, self.device or _default_device())
        check_files(config)
    _check_cpus(self, config)
    _check_machine(config)
    profile = None if config.recall_profile is None else load_profile(config.recall_profile)
    _apply_defaults(self)
    original(self)
    if self.disaggregation_mode == "decode":
        check_resolved_graphs(self)
    check_model(self, config, profile)
    announce(self.disaggregation_mode, PROCESS_CPUS)


def parse(server_args: ServerArgs) -> OffloadConfig:
    """The validated configuration of a server.

    Raises:
        ConfigError: naming flag, value and fix.
    """
    return parse_config(
        policy=server_args.kv_offload,
        policies=POLICY_NAMES,
        budget_tokens=server_args.kv_offload_budget,
        host_gb=server_args.kv_offload_host_gb,
        recall_profile=server_args.kv_offload_recall_profile,
        cpus=server_args.kv_offload_cpus,
        config=server_args.kv_offload_config,
        available_cpus=set(PROCESS_CPUS),
    )


def _refuse_stray_flags(args: ServerArgs) -> None:
    """A tuning flag without the switch is a mistake that would otherwise go unnoticed."""
    for name in _FIELDS:
        value = getattr(args, name)
        if name != "kv_offload" and value is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {value!r}: has no effect without --kv-offload; add --kv-offload "
                f"{POLICY_NAMES[0]} or drop it"
            )


def _check_deployment(args: ServerArgs) -> None:
    """Refuse what this version does not serve correctly."""
    policy = f"--kv-offload {args.kv_offload}"
    if args.disaggregation_mode not in ("prefill", "decode"):
        raise ConfigError(
            f"{policy}: works on the servers of a prefill-decode pair, this one has "
            f"--disaggregation-mode {args.disaggregation_mode}; set it to prefill or decode"
        )
    if args.page_size not in (None, PAGE_SIZE_TOKENS):
        raise ConfigError(
            f"--page-size {args.page_size}: {policy} uses pages of {PAGE_SIZE_TOKENS} tokens; "
            f"drop the flag or set it to {PAGE_SIZE_TOKENS}"
        )
    if args.kv_cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {args.kv_cache_dtype}: {policy} keeps KV in the model's dtype; "
            "set it to auto"
        )
    backends = ("mooncake", "mooncake_tcp", "fake")
    if args.disaggregation_transfer_backend not in backends:
        raise ConfigError(
            f"--disaggregation-transfer-backend {args.disaggregation_transfer_backend}: {policy} "
            f"works with {', '.join(backends)}"
        )
    # attribute, value that is fine, how the flag is written
    for name, fine, flag in (
        ("speculative_algorithm", None, "--speculative-algorithm"),
        ("nnodes", 1, "--nnodes"),
        ("pp_size", 1, "--pp-size"),
        ("dp_size", 1, "--dp-size"),
        ("attn_cp_size", 1, "--attn-cp-size"),
        ("dcp_size", 1, "--dcp-size"),
        ("enable_dp_attention", False, "--enable-dp-attention"),
        # Queries are predicted from layer inputs, which every rank must have whole.
        ("enable_attn_tp_input_scattered", False, "--enable-attn-tp-input-scattered"),
        ("moe_dense_tp_size", None, "--moe-dense-tp-size"),
        ("enable_lora", None, "--enable-lora"),
        ("lora_paths", None, "--lora-paths"),
        ("enable_hierarchical_cache", False, "--enable-hierarchical-cache"),
        ("disaggregation_decode_enable_offload_kvcache", False,
         "--disaggregation-decode-enable-offload-kvcache"),
        ("enable_hisparse", False, "--enable-hisparse"),
        ("enable_pdmux", False, "--enable-pdmux"),
        ("enable_two_batch_overlap", False, "--enable-two-batch-overlap"),
        ("enable_unified_memory", False, "--enable-unified-memory"),
        ("enable_page_major_kv_layout", False, "--enable-page-major-kv-layout"),
        ("enable_torch_compile", False, "--enable-torch-compile"),
        ("kv_canary", "none", "--kv-canary"),
        ("model_impl", "sglang", "--model-impl"),
    ):  # fmt: skip
        value = getattr(args, name, fine)
        if value not in (fine, "auto") and value:
            raise ConfigError(f"{flag} {value}: not supported with {policy}; drop one of the two")
    if args.disaggregation_mode == "decode":
        _check_decode(args, policy)
    if (args.device or _default_device()) == "cpu":
        if (
            args.enable_deterministic_inference
        ):  # SGLang would name an attention backend that nobody gave
            raise ConfigError(
                "--enable-deterministic-inference True: on a CPU SGLang has no attention backend for it; "
                "drop the flag"
            )
        for name in ("attention_backend", "prefill_attention_backend"):
            if getattr(args, name) not in (None, "torch_native"):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{flag} {getattr(args, name)}: on a CPU {policy} works with torch_native; "
                    "drop the flag"
                )


def _check_decode(args: ServerArgs, policy: str) -> None:
    requests = args.max_running_requests
    if requests is not None and not 1 <= requests <= MAX_BATCH:
        raise ConfigError(
            f"--max-running-requests {requests}: {policy} serves 1 to {MAX_BATCH} at once; choose a "
            "number between these"
        )
    if args.decode_attention_backend not in (None, BACKEND_NAME):
        raise ConfigError(
            f"--decode-attention-backend {args.decode_attention_backend}: {policy} brings its own; "
            f"drop the flag or set it to {BACKEND_NAME}"
        )
    for name in ("enable_deterministic_inference", "rl_on_policy_target"):  # which implies it
        if value := getattr(args, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {value}: which pages {policy} has on the device depends on the other requests, and on "
                "them the order in which a request's attention is summed; drop the flag, or serve without "
                "--kv-offload"
            )


def _check_cpus(args: ServerArgs, config: OffloadConfig) -> None:
    if config.cpus is not None and len(config.cpus) < args.tp_size:
        raise ConfigError(
            f"--kv-offload-cpus {args.kv_offload_cpus!r}: {len(config.cpus)} CPU for the workers of "
            f"--tp-size {args.tp_size} ranks; name at least {args.tp_size}, or drop the flag"
        )


def _default_device() -> str:
    from sglang.srt.utils import get_device

    return str(get_device())


def _check_machine(config: OffloadConfig) -> None:
    if config.host_gb is None:
        return
    total_gb, free_gb = psutil.virtual_memory().total / 2**30, available_bytes() / 2**30
    flag = f"--kv-offload-host-gb {config.host_gb:g}"
    if config.host_gb >= total_gb:
        raise ConfigError(
            f"{flag}: this machine has {total_gb:.1f} GiB of memory; at most "
            f"{max(total_gb - 1, 0.1):.1f} can hold KV pages"
        )
    if config.host_gb > free_gb:
        raise ConfigError(
            f"{flag}: only {free_gb:.1f} GiB of memory are available now; lower it or stop what "
            "else uses memory"
        )


def _apply_defaults(args: ServerArgs) -> None:
    """What the flag implies for SGLang's own settings."""
    args.page_size = PAGE_SIZE_TOKENS
    if (args.device or _default_device()) == "cpu":
        # Other CPU backends make SGLang choose Triton for page bookkeeping, which needs a GPU.
        args.attention_backend = args.prefill_attention_backend = "torch_native"
    if args.disaggregation_mode == "decode":
        args.decode_attention_backend = BACKEND_NAME
        if (args.device or _default_device()) != "cpu":
            args.disable_prefill_cuda_graph = (
                True  # would write to the host's pages as if they were the device's
            )
        if args.attention_backend is None and args.prefill_attention_backend is None:
            args.prefill_attention_backend = "triton"  # never runs here; the cheapest to set up
        if args.max_running_requests is None:
            args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
            logger.info(
                "--max-running-requests not given: %d with --kv-offload %s",
                DEFAULT_MAX_RUNNING_REQUESTS,
                args.kv_offload,
            )
