"""What a launcher does: it validates the flags, sets what they imply, and tells its scheduler processes their role."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from sglang_scout.core import numa
from sglang_scout.core.config import FLAGS, PAGE_SIZE_TOKENS, OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import check_files, load_json, parse_config
from sglang_scout.core.profile import load_profile
from sglang_scout.plugin import limits
from sglang_scout.plugin.hooks import (
    FIELDS,
    RELEASE,
    VERSION,
    ServerArgs,
    adapter,
    apply,
    hook,
    hooks_of,
)
from sglang_scout.policy import policies

logger = logging.getLogger(__name__)

DEFAULT_MAX_RUNNING_REQUESTS = 64
LAST_RESORT_S = 3600
CPU_ENVIRONMENT = {  # as in scripts/cpu_env.sh, which says why
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_NCCL_SO_PATH": "no-gpu",
    "OMP_WAIT_POLICY": "PASSIVE",
}
ROLE_ENV = "SGLANG_SCOUT_ROLE"
"""From the launcher to its scheduler processes, which are hooked by it. Another server that inherits it ignores it."""


class Launched(NamedTuple):
    """A scheduler process, as its launcher described it."""

    role: str
    launcher: int
    cpus: frozenset[int]


def launched_as() -> Launched | None:
    """The launcher's message to this process; None in the launcher itself, and if it is another launcher's."""
    message, parent = os.environ.get(ROLE_ENV), multiprocessing.parent_process()
    if not message or parent is None:
        return None
    launched = msgspec.json.decode(message, type=Launched)
    return launched if launched.launcher == parent.pid else None


_LAUNCHED = launched_as()
PROCESS_CPUS = _LAUNCHED.cpus if _LAUNCHED else frozenset(os.sched_getaffinity(0))
"""CPU affinity at server start. SGLang may bind a scheduler process to a NUMA node, and its model thread to one CPU."""

_WITH_FIELDS = "Add the `--kv-offload` fields in a subclass, so that its parser has the flags."
hook({"0.5.23": "server_args.ServerArgs"}, "replace", why=_WITH_FIELDS, roles="flags")(ServerArgs)


@hook({"0.5.15.post1": "server_args.ServerArgs.__init__"}, "around")
def around_init(original, self: ServerArgs, *args, **kwargs) -> None:
    """Accept the `--kv-offload` fields; they are added to the live class, so that its parser has the flags."""
    # The generated __init__ does not know them: set them here, pass the rest on.
    for name, (_, default, _) in FIELDS.items():
        setattr(self, name, kwargs.pop(name, default))
    original(self, *args, **kwargs)


@hook(
    {
        "0.5.15.post1": "server_args.ServerArgs.__post_init__",
        "0.5.23": "server_args.ServerArgs.resolve_once",
    },
    "around",
)
def around_resolve(original, self: ServerArgs) -> None:
    """Validate the flags, set page size and attention backends, check the model."""
    if getattr(self, "_resolution_finished", False):
        return  # SGLang 0.5.23 calls it again
    try:
        _resolve(original, self)
    except ConfigError:
        sys.excepthook = partial(_print_refusal, sys.excepthook)
        raise


def _print_refusal(otherwise: Any, kind: type[BaseException], error: Any, trace: Any) -> None:
    """An uncaught refusal ends the launcher with its message, without a traceback."""
    if isinstance(error, ConfigError):
        print(f"sglang-scout: {error}", file=sys.stderr)
    else:
        otherwise(kind, error, trace)


def _resolve(original: Callable[..., None], self: ServerArgs) -> None:
    if self.kv_offload == "none":
        os.environ.pop(ROLE_ENV, None)
        for name in FIELDS:
            if name != "kv_offload" and (value := getattr(self, name)) is not None:
                why = "has no effect without --kv-offload; add --kv-offload POLICY or drop it"
                raise ConfigError(f"{limits.flag_of(name)} {value!r}: {why}")
        original(self)
        return
    if isinstance(self.kv_offload_config, str) and self.kv_offload_config.startswith("@"):
        # The scheduler processes parse it again, and the file may be gone by then.
        self.kv_offload_config = json.dumps(load_json(self.kv_offload_config))
    config = parse(self)
    if VERSION != RELEASE:
        what = f"sglang {VERSION} is untested with this sglang-scout, which treats it as {RELEASE}"
        logger.warning(f"{what}; if anything fails, install sglang=={RELEASE}")
    limits.check_deployment(self, config)
    if self.disaggregation_mode == "decode":
        check_files(config)
    if config.recall_profile is not None:
        load_profile(config.recall_profile)  # refused before a model is fetched
    _apply_defaults(self)
    original(self)
    if self.disaggregation_mode == "decode":
        limits.check_resolved_graphs(adapter.resolved(self), config)
    limits.check_model(self, config)
    apply(hooks_of("http"))
    # After halves.py has read the first, which knows better than a timeout whether the other half of a request waits
    # in a queue or is lost. A queue of long prompts takes longer than SGLang's 300 s.
    os.environ["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] = str(LAST_RESORT_S)
    os.environ.setdefault("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", str(LAST_RESORT_S))
    launched = Launched(self.disaggregation_mode, os.getpid(), PROCESS_CPUS)
    os.environ[ROLE_ENV] = msgspec.json.encode(launched).decode()


def parse(args: ServerArgs) -> OffloadConfig:
    given = {name: getattr(args, flag[2:].replace("-", "_")) for name, flag in FLAGS.items()}
    return parse_config(**given, policies=policies(), available_cpus=set(PROCESS_CPUS))


def _apply_defaults(args: ServerArgs) -> None:
    """SGLang settings implied by the flag."""
    adapter.apply_defaults(args)
    args.page_size = PAGE_SIZE_TOKENS
    # Longer than the router keeps an idle connection, observed to be 95 to 100 s: with SGLang's 5 s a server may close
    # one just as the router sends a request on it, and the other server waits for that request in vain.
    os.environ.setdefault("SGLANG_TIMEOUT_KEEP_ALIVE", "120")
    reach_directly(args.host)
    on_cpu = limits.device_of(args) == "cpu"
    if not numa.has_rdma():
        os.environ.setdefault("MOONCAKE_PROTOCOL", "tcp")  # mooncake's default, rdma, would fail
    if on_cpu:
        for name, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # With other CPU backends SGLang chooses Triton for page bookkeeping, which needs a GPU.
        args.attention_backend = args.prefill_attention_backend = "torch_native"
    if args.disaggregation_mode == "prefill":
        if on_cpu:
            # Else /health waits for the scheduler, whose step on a CPU may take longer than the router's 5 s or
            # SGLang's 20 s. A scheduler that ends takes the server with it.
            os.environ.setdefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0")
        return
    args.decode_attention_backend = limits.BACKEND_NAME
    if not on_cpu:
        # They would write to host pages as if these were on the device.
        args.disable_prefill_cuda_graph = True
    if args.attention_backend is None and args.prefill_attention_backend is None:
        args.prefill_attention_backend = "triton"  # never runs here; cheapest setup
    if args.max_running_requests is None:
        args.max_running_requests = most = DEFAULT_MAX_RUNNING_REQUESTS
        logger.info(f"--max-running-requests not given: set to {most} with --kv-offload")


def reach_directly(host: str) -> None:
    """Let SGLang's warm-up reach this ``host`` without a proxy, through which a model may still be downloaded."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if given != "*":
        names = (given, host, "localhost", "127.0.0.1", "::1")
        os.environ["no_proxy"] = ",".join(filter(None, names))
