"""State for operators: ``/server_info`` and the metadata in traces and step logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.profile import selection_of
from sglang_scout.core.step_log import StepLog
from sglang_scout.ops.op import chosen
from sglang_scout.plugin.model import model_identity
from sglang_scout.plugin.release import VERSION

if TYPE_CHECKING:
    from sglang_scout.plugin.backend import ScoutAttnBackend

_FACTS = "policy budget_tokens digest mass precompute exact_layers recall".split()
_OF_WORKER = (
    "pid state restarts cpus cpu_nodes pages remote_pages refused refused_messages local_tickets late_tickets "
    "last_error"
).split()
_OF_EACH_RANK = (
    "resident_pages selected_pages cpu_pages cpu_compute_ratio recalled_pages gpu_wait_us fallback_pages "
    "checksum_failures digests_received digests_computed verify_checks verify_max_rel_error "
    "verify_unequal_selections worker cpus"
).split()


def facts(config: OffloadConfig, num_layers: int, cpus: list[int]) -> dict[str, Any]:
    """Metadata of this server for its output files."""
    of_config = {key: getattr(config, key) for key in _FACTS}
    return of_config | {"layers": num_layers, "worker_cpus": cpus}


def open_step_log(
    config: OffloadConfig, facts: dict[str, Any], model_config: Any
) -> StepLog | None:
    """The configured step log."""
    if config.step_log is None:
        return None
    of_log = {
        "page_size_tokens": config.page_size_tokens,
        "model": Path(model_config.model_path).name,
        "identity": model_identity(model_config),
        "selection": selection_of(config),
    }
    try:
        return StepLog(config.step_log, facts | of_log)
    except OSError as error:
        raise ConfigError(
            f"--kv-offload-config: step_log = {config.step_log!r}: cannot write it: {error.strerror}; "
            "name another file"
        ) from error


def decode_state(backend: ScoutAttnBackend) -> dict[str, Any]:
    """The documented fields, plain numbers and strings only."""
    counters, worker = backend.engine.counters, backend.worker.snapshot()
    digests, older = backend.pool.digests, backend.engine.older
    checksums, table = backend.pool.host_pages.checksums, backend.engine.table
    context_used, context_total = (0, 0) if older is None else older.context_pages
    ratios = counters.cpu_pages_by_layer / np.maximum(1, counters.budget_pages_by_layer)
    return {
        "policy": backend.policy.name,
        "sglang": VERSION,
        "backend": f"{digests.device.type}-{worker.isa}",
        "transport": backend.transport,
        "ops": chosen(),
        "plan": [
            {"what": what, "count": count, "bytes": size} for what, count, size in backend.plan.rows
        ],
        "cpus": [use._asdict() for use in backend.cpu_plan.rows],
        "tp_size": backend.ranks.size,
        "budget_tokens": backend.config.budget_tokens,
        "page_size": backend.config.page_size_tokens,
        "host_pages_total": backend.allocator.num_pages,
        "host_pages_used": backend.allocator.used_pages,
        "resident_pages": table.resident_pages,
        "resident_pages_by_layer": table.resident_pages_by_layer.tolist(),
        "copying_pages_by_layer": table.copying_pages_by_layer.tolist(),
        "resident_slots": backend.plan.num_slots * backend.engine.shape.num_layers,
        "context_pages_total": context_total,
        "context_pages_used": context_used,
        **counters.totals(),
        "cpu_compute_ratio": counters.cpu_compute_ratio,
        "cpu_compute_ratio_by_layer": ratios.tolist(),
        "recall": {"mode": backend.config.recall} | backend.policy.residency.describe(),
        "gpu_wait_us_by_layer": counters.gpu_wait_us_by_layer.tolist(),
        "fallback_pages": worker.fallback_pages,
        "checksum_failures": 0 if checksums is None else checksums.failures,
        "digests_received": digests.received,
        "digests_computed": digests.computed,
        "worker": {name: getattr(worker, name) for name in _OF_WORKER},
    }


def decode_state_of_ranks(backend: ScoutAttnBackend) -> dict[str, Any]:
    """The same, with the differences between tensor-parallel ranks in ``ranks``. All ranks must call it."""
    state = decode_state(backend)
    state["ranks"] = backend.ranks.gather({key: state[key] for key in _OF_EACH_RANK})
    return state


def prefill_state(scheduler: Any) -> dict[str, Any]:
    """State of a prefill server: its digests."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    digests = getattr(pool, "digests", None)
    hints = digests.hints if digests is not None else None
    return {
        "policy": scheduler.server_args.kv_offload,
        "sglang": VERSION,
        "page_size": pool.page_size,
        "digests_sent": digests is not None,
        "digests_computed": digests.computed if digests is not None else 0,
        "hints_made": hints.made if hints is not None else 0,
    }
