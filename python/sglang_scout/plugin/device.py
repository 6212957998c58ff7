"""The decode server on a CUDA device: page-locked host pages, and the engine whose steps are graphs.

``step_engine = device`` runs the same on the CPU device, with the ring's kernels in Triton's interpreter:
slow, for tests.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.server_args import ServerArgs

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.engine.device import LOCK_CHUNK_BYTES, lock_memory
from sglang_scout.engine.device_step import DeviceStepEngine
from sglang_scout.ops import triton
from sglang_scout.ops.doorbell import DeviceRing
from sglang_scout.policy.presets import COPY_AHEAD_POLICIES, POLICY_NAMES
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.client import WorkerClient

logger = logging.getLogger(__name__)

MIN_WAIT_S = 3.0
MAX_TABLE_PAGES = 8192  # columns that select_pages takes on a device


def uses_device_engine(config: OffloadConfig, device: str) -> bool:
    """Whether steps run without the host in between."""
    if config.step_engine != "auto":
        return config.step_engine == "device"
    return torch.device(device).type == "cuda"


def check_device_engine(args: ServerArgs, config: OffloadConfig, device: str) -> None:
    """Refuse what the device's engine does not do.

    Raises:
        ConfigError: naming flag, value and fix.
    """
    on_cuda = torch.device(device).type == "cuda"
    flag = "--kv-offload-config"
    if config.step_engine == "host" and on_cuda:
        raise ConfigError(f"{flag}: step_engine = 'host' needs --device cpu; drop it")
    if not uses_device_engine(config, device):
        return
    if not on_cuda and not triton.interpreted():
        raise ConfigError(
            f"{flag}: step_engine = 'device' on --device {device} needs Triton's interpreter; set "
            "TRITON_INTERPRET=1, or drop the key"
        )
    if config.policy in COPY_AHEAD_POLICIES:
        raise ConfigError(
            f"--kv-offload {config.policy}: copies missing pages within a step, which the engine of this "
            f"device does not do; choose {POLICY_NAMES[0]}"
        )
    if config.worker_wait_timeout_s < MIN_WAIT_S:
        raise ConfigError(
            f"{flag}: worker_wait_timeout_s = {config.worker_wait_timeout_s:g}: a device ends the server "
            f"when it waits in vain, and a silent worker takes up to two seconds to be noticed; set {MIN_WAIT_S:g} "
            "or more"
        )
    if args.enable_return_hidden_states:
        raise ConfigError(
            "--enable-return-hidden-states: makes SGLang capture graphs anew while it serves; drop it, or "
            "use --device cpu"
        )
    if on_cuda:
        _check_where_weights_are(args)
    if on_cuda and args.debug_cuda_graph:
        # SGLang runs it in pieces, and ends where the graphs are not of these.
        raise ConfigError(
            "--debug-cuda-graph True: a step of --kv-offload is one graph or none; drop it, or give "
            "--cuda-graph-backend-decode disabled in its place to run without graphs"
        )
    graphs = graphs_of(args, "decode")
    if on_cuda and graphs not in (None, "full", "disabled"):
        raise ConfigError(
            f"--cuda-graph-backend-decode {graphs}: a step of --kv-offload is one graph or none; choose full or "
            "disabled"
        )
    if on_cuda and args.disable_cuda_graph_padding and graphs != "disabled":
        # It asks whether the number of requests is a key of its graphs, which have others.
        raise ConfigError(
            "--disable-cuda-graph-padding: this SGLang then captures a graph for each batch size and replays none; "
            "drop it, or give --cuda-graph-backend-decode disabled to run without graphs"
        )
    prefill_graphs = graphs_of(args, "prefill")
    if prefill_graphs not in (None, "disabled"):
        raise ConfigError(
            f"--cuda-graph-backend-prefill {prefill_graphs}: the decode server of --kv-offload does not "
            "prefill; drop the flag"
        )
    if config.verify and on_cuda and graphs != "disabled":
        raise ConfigError(f"{flag}: verify = true needs --cuda-graph-backend-decode disabled")


def _check_where_weights_are(args: ServerArgs) -> None:
    """A layer that brings its weights to the device when it runs calls itself for that, which the hooks before
    layers take for a second layer; and the next one's query is computed before that one has brought its own."""
    for name in ("cpu_offload_gb", "offload_group_size"):
        if (value := getattr(args, name)) > 0:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {value}: --kv-offload predicts the queries of a layer before it runs, from weights that are "
                "on the device; drop the flag, or spread the weights with --tp-size"
            )


def check_resolved_graphs(args: ServerArgs) -> None:
    """Refuse what SGLang has made of its own flags and defaults, if a step would not be one graph or none.

    Raises:
        ConfigError: naming phase, value and fix.
    """
    if torch.device(args.device).type != "cuda":
        return
    for phase, fine in (("decode", ("full", "disabled")), ("prefill", ("disabled",))):
        backend = getattr(args.cuda_graph_config, phase).backend
        if backend not in fine:
            raise ConfigError(
                f"--cuda-graph-backend-{phase} {backend}: is what SGLang makes of this server's flags, and "
                f"--kv-offload needs {' or '.join(fine)}; give --cuda-graph-backend-{phase} {fine[0]}"
            )


def graphs_of(args: ServerArgs, phase: str) -> str | None:
    """Which graphs SGLang's flags ask for in a phase, "decode" or "prefill": "full", "breakable", "tc_piecewise" or
    "disabled"; None if they leave it to SGLang. It folds them into one only later, in this order
    (``ServerArgs._parse_cuda_graph_config``)."""
    explicit = args.cuda_graph_config
    phases = explicit if isinstance(explicit, dict) else getattr(explicit, "to_dict", dict)()
    if backend := phases.get(phase, {}).get("backend"):
        return str(backend)
    if (backend := getattr(args, f"cuda_graph_backend_{phase}")) is not None:
        return str(backend)
    is_off = getattr(args, f"disable_{phase}_cuda_graph") or args.disable_cuda_graph
    return "disabled" if is_off else None


def lock_pages(arena: Arena) -> None:
    """Page-lock what the device uses of the arena, for as long as this process lives.

    Raises:
        ConfigError: the system does not allow it.
    """

    def progress(done: int) -> None:
        if arena.nbytes > LOCK_CHUNK_BYTES:
            of = arena.nbytes / 2**30
            logger.info("--kv-offload: %.0f of %.0f GiB are page-locked", done / 2**30, of)

    try:
        lock_memory(arena.address, arena.nbytes, progress)
    except MemoryError as error:
        raise ConfigError(f"--kv-offload-host-gb: {error}, or lower the flag") from None


def make_device_engine(
    runner: Any,
    arena: Arena,
    worker: WorkerClient,
    timeout_s: float,
    faults: torch.Tensor | None,
    rank: int,
    parts: dict[str, Any],
) -> DeviceStepEngine:
    """The engine, and its ring to ``worker``.

    Args:
        timeout_s: how long a step waits for the worker.
        faults, rank: as of :class:`DeviceRing`; the words lie in memory that the ranks share.
        parts: what both engines take.
    Raises:
        ConfigError: the context is longer than the device can select from, or the system does not allow
            to page-lock ``faults``.
    """
    spec, model = arena.spec, runner.model_config
    # Not the width of SGLang's request table, which is a few tokens more: a step that is launched before the
    # end of its request was seen writes to position context_len - 2 at most, and a page more makes the table
    # of a context of 2^n tokens, and what the kernels take for one, twice as wide.
    max_pages = -(-model.context_len // spec.page_size)
    if max_pages > MAX_TABLE_PAGES:
        raise ConfigError(
            f"--context-length {model.context_len}: {max_pages} pages of {spec.page_size} tokens, a "
            f"device selects from {MAX_TABLE_PAGES} at most; lower it to "
            f"{MAX_TABLE_PAGES * spec.page_size}"
        )
    worker.serve_device()
    if faults is not None and torch.device(runner.device).type == "cuda":
        try:
            lock_memory(faults.data_ptr(), faults.nbytes)
        except MemoryError as error:
            raise ConfigError(f"--tp-size: a page that the ranks share: {error}") from None
    ring = DeviceRing(
        arena.address,
        arena.layout(),
        num_layers=spec.num_layers,
        max_batch=spec.max_batch,
        max_pages=spec.max_pages,
        num_q_heads=spec.num_q_heads,
        head_dim=spec.head_dim,
        parts=worker.parts,
        split=worker.split,
        timeout_us=int(timeout_s * 1e6),
        device=runner.device,
        num_nodes=spec.num_nodes,
        faults=faults,
        rank=rank,
    )
    return DeviceStepEngine(
        max_pages=max_pages,
        ring=ring,
        life=lambda: worker.device_epoch,
        **parts,
    )
