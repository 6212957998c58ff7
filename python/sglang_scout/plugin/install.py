"""What is hooked, in which process, and the check that it took.

The launcher only gets the flags. Everything else is registered in the scheduler process of a server
that was started with ``--kv-offload``; the launcher says so through ``SGLANG_SCOUT_ROLE``, which its
children inherit with its pid and its CPUs: a process whose parent is another one is no scheduler of it.
Without the flag SGLang stays as it is.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_scout.worker.die_with_parent import die_with_parent

ROLE_ENV = "SGLANG_SCOUT_ROLE"
SUPPORTED_SGLANG = "0.5.15.post1"

_SRT = "sglang.srt."
_SERVER_ARGS = _SRT + "server_args.ServerArgs."
_POOLS = _SRT + "model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin."
_SCHEDULER = _SRT + "managers.scheduler.Scheduler."
_ENGINE = _SRT + "distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine."
_RUNNER = _SRT + "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner."

# target -> why it is hooked (the hook functions are named in _hooks_of).
FLAG_TARGETS = {
    _SERVER_ARGS + "__init__": "accept the --kv-offload fields",
    _SERVER_ARGS + "__post_init__": "validate them and set the defaults they imply",
}
DECODE_TARGETS = {
    _POOLS + "_profile_available_bytes": "size the KV pool by host memory",
    _POOLS + "_init_pools": "put the KV pool into the arena shared with the worker",
    _SRT
    + "disaggregation.decode_schedule_batch_mixin."
    + "ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt": "a request joins the batch",
    _SCHEDULER + "get_internal_state": "state for /server_info",
    _SRT
    + "managers.scheduler_components.batch_result_processor."
    + "SchedulerBatchResultProcessor.process_batch_result_decode": (
        "no token of a step that lacks a part of its attention"
    ),
    _SRT + "managers.schedule_batch.alloc_for_decode": "know on the host which pages a step opens",
    _RUNNER + "can_run_graph": "begin the step before it is known whether a graph can run it",
    _RUNNER + "capture_one_shape": "capture the steps in which a request is new as well",
    _RUNNER + "_resolve_lora_variant": "replay the graph of such a step",
    _ENGINE + "batch_register": "no server whose memory the transfer engine does not take",
}
PREFILL_TARGETS = {
    _POOLS + "_profile_available_bytes": "leave room for the digests",
    _POOLS + "_init_pools": "a digest pool beside the KV pool",
    _SRT + "disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk": (
        "compute the digests of the pages that are about to be sent"
    ),
    _SRT + "disaggregation.mooncake.conn.MooncakeKVManager._send_kvcache_generic": (
        "leave the digests out for a decode server without --kv-offload"
    ),
    _SRT + "disaggregation.mooncake.conn.MooncakeKVManager.send_kvcache_slice": (
        "leave them out for one of another --tp-size"
    ),
    _SCHEDULER + "get_internal_state": "state for /server_info",
    _SRT
    + "layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend": (
        "no attention for tokens whose KV is there already; the CPU's backend only"
    ),
    _ENGINE + "batch_register": "no server whose memory the transfer engine does not take",
}
TARGETS_OF_ROLE = {"decode": DECODE_TARGETS, "prefill": PREFILL_TARGETS}


def install() -> None:
    """Register the hooks of this process and make sure that they took.

    Raises:
        RuntimeError: wrong SGLang version, or a target that is not there or was not patched.
    """
    found = version("sglang")
    if found != SUPPORTED_SGLANG:
        raise RuntimeError(
            f"sglang {found} is installed, this sglang-scout works with {SUPPORTED_SGLANG}; "
            f"install sglang=={SUPPORTED_SGLANG}"
        )
    from sglang_scout.plugin import args

    args.add_fields()
    _register(
        {
            _SERVER_ARGS + "__init__": (args.around_init, HookType.AROUND),
            _SERVER_ARGS + "__post_init__": (args.around_post_init, HookType.AROUND),
        }
    )
    if launched := launched_as():
        # SGLang asks for the same later; a scheduler whose launcher ended before that would fail without
        # ending, because the transfer engine's threads hold it, and so would its attention worker.
        die_with_parent(launched.launcher)
        _register(_hooks_of(launched.role))


class Launched(NamedTuple):
    """What a launcher tells its scheduler processes: their role, its process, and the CPUs that it may run on."""

    role: str
    launcher: int
    cpus: frozenset[int]


def announce(role: str, cpus: Iterable[int]) -> None:
    """In the launcher: tell the scheduler processes to come what they are."""
    os.environ[ROLE_ENV] = f"{role}:{os.getpid()}:{','.join(map(str, sorted(cpus)))}"


def launched_as() -> Launched | None:
    """What the launcher has told this process; None in the launcher itself."""
    role, _, rest = os.environ.get(ROLE_ENV, "").partition(":")
    launcher, _, cpus = rest.partition(":")
    if not role or int(launcher) == os.getpid():
        return None
    return Launched(role, int(launcher), frozenset(map(int, cpus.split(","))))


def _hooks_of(role: str) -> dict[str, tuple[Callable[..., Any], HookType]]:
    """The hooks of a scheduler process. Imports the heavy modules, so only called there."""
    from sglang_scout.plugin import cpu_extend, hooks

    decode, prefill = DECODE_TARGETS, PREFILL_TARGETS
    functions: dict[str, dict[str, tuple[Callable[..., Any], HookType]]] = {
        "decode": dict(
            zip(
                decode,
                (
                    (hooks.around_profile_available_bytes, HookType.AROUND),
                    (hooks.around_init_pools_decode, HookType.AROUND),
                    (hooks.after_prepare_for_prebuilt, HookType.AFTER),
                    (hooks.after_get_internal_state, HookType.AFTER),
                    (hooks.before_process_batch_result, HookType.BEFORE),
                    (hooks.after_alloc_for_decode, HookType.AFTER),
                    (hooks.around_can_run_graph, HookType.AROUND),
                    (hooks.around_capture_one_shape, HookType.AROUND),
                    (hooks.around_resolve_variant, HookType.AROUND),
                    (hooks.around_batch_register, HookType.AROUND),
                ),
                strict=True,
            )
        ),
        "prefill": dict(
            zip(
                prefill,
                (
                    (hooks.around_profile_available_bytes_prefill, HookType.AROUND),
                    (hooks.around_init_pools_prefill, HookType.AROUND),
                    (hooks.before_send_kv_chunk, HookType.BEFORE),
                    (hooks.before_send_kvcache, HookType.BEFORE),
                    (hooks.around_send_kvcache_slice, HookType.AROUND),
                    (hooks.after_get_internal_state, HookType.AFTER),
                    (cpu_extend.around_extend, HookType.AROUND),
                    (hooks.around_batch_register, HookType.AROUND),
                ),
                strict=True,
            )
        ),
    }
    if role == "decode":
        hooks.register_backend()
    return functions[role]


def _register(hooks: dict[str, tuple[Callable[..., Any], HookType]]) -> None:
    """Resolve, register, apply and verify; SGLang itself only logs what goes wrong here."""
    for target, (function, kind) in hooks.items():
        resolve(target)
        HookRegistry.register(target, function, kind)
    HookRegistry.apply_hooks()
    verify(hooks)


def resolve(target: str) -> None:
    """Make sure that a hook target exists.

    Raises:
        RuntimeError: naming the target.
    """
    try:
        pkgutil.resolve_name(target)
    except Exception as error:
        raise RuntimeError(f"hook target {target} is not in this SGLang: {error}") from error


def verify(targets: Any) -> None:
    """Make sure that every target has been patched.

    Raises:
        RuntimeError: naming the missing ones.
    """
    absent = sorted(set(targets) - HookRegistry._patched)
    if absent:
        raise RuntimeError(f"hooks that did not take: {', '.join(absent)}")
