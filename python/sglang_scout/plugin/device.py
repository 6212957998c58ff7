"""The decode server on a CUDA device: page-locked host pages and CUDA graphs.

``transport = graph`` runs the same on the CPU device, with the ring's kernels in Triton's interpreter:
slow, for tests.
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.server_args import ServerArgs

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.engine.device import LOCK_CHUNK_BYTES, lock_memory
from sglang_scout.ops import triton
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.settings import WorkerConfig

logger = logging.getLogger(__name__)

HOST_SPIN_US = 50
DEVICE_SPIN_US = 20_000  # as long as a step
READY_TIMEOUT_S = 60.0
MAX_TABLE_PAGES = 8192  # columns that select_pages takes on a device


def uses_graph_transport(config: OffloadConfig, device: str) -> bool:
    """Whether the device's stream, not the host, posts to the attention process."""
    if config.transport != "auto":
        return config.transport == "graph"
    return torch.device(device).type == "cuda"


def worker_config(config: OffloadConfig, device: str) -> WorkerConfig:
    """Configuration of the attention process for a server on ``device``."""
    return WorkerConfig(
        ready_timeout_s=READY_TIMEOUT_S,
        # A kernel cannot wake a sleeping thread: the attendant does, but later.
        spin_us=DEVICE_SPIN_US if uses_graph_transport(config, device) else HOST_SPIN_US,
        threads_per_group=config.worker_threads_per_group,
        # Page-locked host pages are allocated at start.
        populate=torch.device(device).type == "cuda",
    )


def check_graph_transport(args: ServerArgs, config: OffloadConfig, device: str) -> None:
    """Refuse what the device's engine does not support."""
    on_cuda = torch.device(device).type == "cuda"
    flag = "--kv-offload-config"
    if config.transport == "host" and on_cuda:
        raise ConfigError(f"{flag}: transport = 'host' needs --device cpu; drop the key")
    if not uses_graph_transport(config, device):
        return
    if not on_cuda and not triton.interpreted():
        raise ConfigError(
            f"{flag}: transport = 'graph' on --device {device} needs Triton's interpreter; set "
            "TRITON_INTERPRET=1, or drop the key"
        )
    if args.enable_return_hidden_states:
        raise ConfigError(
            "--enable-return-hidden-states: makes SGLang capture CUDA graphs again while it serves; drop the flag, or "
            "use --device cpu"
        )
    if on_cuda:
        _check_where_weights_are(args)
    if on_cuda and args.debug_cuda_graph:
        # SGLang runs it in pieces, and fails if the graphs are not piecewise.
        raise ConfigError(
            "--debug-cuda-graph True: --kv-offload runs a decode step as one CUDA graph or without graphs; drop the "
            "flag, or set --cuda-graph-backend-decode disabled instead to run without graphs"
        )
    graphs = graphs_of(args, "decode")
    if on_cuda and graphs not in (None, "full", "disabled"):
        raise ConfigError(
            f"--cuda-graph-backend-decode {graphs}: --kv-offload runs a decode step as one CUDA graph or without "
            "graphs; choose full or disabled"
        )
    if on_cuda and args.disable_cuda_graph_padding and graphs != "disabled":
        # It looks up its graphs by the number of requests, but their keys differ.
        raise ConfigError(
            "--disable-cuda-graph-padding: with it this SGLang captures a graph for each batch size but replays none; "
            "drop the flag, or set --cuda-graph-backend-decode disabled to run without graphs"
        )
    prefill_graphs = graphs_of(args, "prefill")
    if prefill_graphs not in (None, "disabled"):
        raise ConfigError(
            f"--cuda-graph-backend-prefill {prefill_graphs}: with --kv-offload the decode server runs no "
            "prefill; drop the flag"
        )
    if config.verify and on_cuda and graphs != "disabled":
        raise ConfigError(f"{flag}: verify = true needs --cuda-graph-backend-decode disabled")


def _check_where_weights_are(args: ServerArgs) -> None:
    """A layer that loads its weights to the device when it runs calls itself for that, which the pre-hooks see as a
    second layer; and the next layer's query is computed before that layer has loaded its weights."""
    for name in ("cpu_offload_gb", "offload_group_size"):
        if (value := getattr(args, name)) > 0:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {value}: --kv-offload predicts the queries of a layer before it runs, from weights that are "
                "on the device; drop the flag, or spread the weights with --tp-size"
            )


def check_resolved_graphs(args: ServerArgs) -> None:
    """Refuse SGLang's resolved flags and defaults if a step would be neither one graph nor eager."""
    if torch.device(args.device).type != "cuda":
        return
    for phase, fine in (("decode", ("full", "disabled")), ("prefill", ("disabled",))):
        backend = getattr(args.cuda_graph_config, phase).backend
        if backend not in fine:
            raise ConfigError(
                f"--cuda-graph-backend-{phase} {backend}: SGLang derives this from the server's other flags, "
                f"but --kv-offload needs {' or '.join(fine)}; set --cuda-graph-backend-{phase} {fine[0]}"
            )


def graphs_of(args: ServerArgs, phase: str) -> str | None:
    """The graphs that SGLang's flags request in a phase, "decode" or "prefill": "full", "breakable", "tc_piecewise" or
    "disabled"; None if left to SGLang. It merges the flags only later, in this order
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
    """Page-lock the arena's parts that the device uses, until this process ends."""

    def progress(done: int) -> None:
        if arena.nbytes > LOCK_CHUNK_BYTES:
            of = arena.nbytes / 2**30
            logger.info("--kv-offload: %.0f of %.0f GiB are page-locked", done / 2**30, of)

    try:
        lock_memory(arena.address, arena.nbytes, progress)
    except MemoryError as error:
        raise ConfigError(f"--kv-offload-host-gb: {error}, or lower the flag") from None


def check_context(context_tokens: int, page_size: int) -> None:
    """Refuse a context that a device cannot select from."""
    pages = -(-context_tokens // page_size)
    if pages > MAX_TABLE_PAGES:
        raise ConfigError(
            f"--context-length {context_tokens}: {pages} pages of {page_size} tokens, but the device kernels "
            f"select from at most {MAX_TABLE_PAGES}; lower it to {MAX_TABLE_PAGES * page_size}"
        )


def lock_shared_page(words: torch.Tensor) -> None:
    """Page-lock a page that tensor-parallel ranks share, for a device to write to."""
    try:
        lock_memory(words.data_ptr(), words.nbytes)
    except MemoryError as error:
        raise ConfigError(f"--tp-size: a page that the ranks share: {error}") from None
