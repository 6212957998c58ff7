"""What operators see: ``/server_info``, ``/metrics`` and the facts in traces and step logs."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.profile import selection_of
from sglang_scout.core.registry import chosen
from sglang_scout.engine.counters import Counters
from sglang_scout.engine.step_log import StepLog
from sglang_scout.plugin.line import VERSION, adapter
from sglang_scout.plugin.support import model_identity

if TYPE_CHECKING:
    from sglang_scout.plugin.backend import ScoutAttnBackend

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL_S = 1.0

# state key -> (kind, help). A counter's name gets the suffix _total from prometheus-client.
_METRICS = {
    "budget_tokens": ("gauge", "Tokens attended to in full pages, per request, layer and step."),
    "page_size": ("gauge", "Tokens of a page."),
    "host_pages_total": ("gauge", "Host pages for KV."),
    "host_pages_used": ("gauge", "Host pages in use by requests or the radix cache."),
    "resident_pages": ("gauge", "Pages on the device, summed over layers."),
    "cpu_compute_ratio": ("gauge", "Pages computed on the CPU over the budget, since start."),
    "steps": ("counter", "Decode steps."),
    "dense_steps": ("counter", "Steps that attended to all pages, which were resident."),
    "selected_pages": ("counter", "Pages selected, summed over requests, layers and steps."),
    "cpu_pages": ("counter", "Selected pages that were computed on the CPU."),
    "fetched_pages": (
        "counter",
        "Selected pages that were copied to the device ahead of their layer.",
    ),
    "recalled_pages": ("counter", "Pages recalled to the device asynchronously."),
    "recall_bytes": ("counter", "Bytes copied by recalls."),
    "recall_wait_us": ("counter", "Microseconds that steps waited for recalls."),
    "gpu_wait_us": ("counter", "Microseconds the device waited for the worker."),
    "fallback_pages": ("counter", "Pages the decode server computed in place of the worker."),
    "checksum_failures": ("counter", "Pages of a layer that had changed in host memory."),
    "context_pages_total": ("gauge", "Pages for tokens kept by single heads, summed over layers."),
    "context_pages_used": ("gauge", "Those of them that hold some."),
    "raised_thresholds": ("counter", "Heads without room for what they would keep."),
    "worker_restarts": ("counter", "Times the worker was replaced."),
    "worker_up": ("gauge", "1 while the worker answers."),
    "step_seconds": ("histogram", "From a step's boundary, or the step before, to its tokens."),
    "boundary_seconds": ("histogram", "What the host decides before a step."),
    "gpu_wait_seconds": ("histogram", "A step's waits for the worker, over all layers."),
}
_BUCKETS_S = tuple(x * 10.0**power for power in range(-4, 1) for x in (1, 2, 5))


_FACTS = (
    "policy", "budget_tokens", "digest", "mass", "attend", "precompute", "exact_layers",
    "recall",
)  # fmt: skip
_TOTALS = (
    "steps", "dense_steps", "selected_pages", "cpu_pages", "fetched_pages", "budget_pages", "cpu_compute_ratio",
    "warmed_pages", "recalled_pages", "recall_bytes", "recall_wait_us", "gpu_wait_us",
    "raised_thresholds", "verify_checks", "verify_max_rel_error", "verify_unequal_selections",
)  # fmt: skip
_OF_WORKER = (
    "pid", "state", "restarts", "cpus", "cpu_nodes", "pages", "remote_pages", "refused", "refused_messages",
    "local_tickets", "late_tickets", "last_error",
)  # fmt: skip


def facts(config: OffloadConfig, num_layers: int, cpus: list[int]) -> dict[str, Any]:
    """What a reader of this server's files should know of it."""
    of_config = {key: getattr(config, key) for key in _FACTS}
    return of_config | {"layers": num_layers, "worker_cpus": cpus}


def open_step_log(
    config: OffloadConfig, facts: dict[str, Any], counters: Counters, model_config: Any
) -> StepLog | None:
    """The step log that the configuration asks for."""
    if config.step_log is None:
        return None
    of_log = {
        "page_size_tokens": config.page_size_tokens,
        "model": Path(model_config.model_path).name,
        "identity": model_identity(model_config),
        "selection": selection_of(config),
    }
    try:
        return StepLog(config.step_log, counters, facts | of_log)
    except OSError as error:
        raise ConfigError(
            f"--kv-offload-config: step_log = {config.step_log!r}: cannot write it: {error.strerror}"
        ) from error


def decode_state(backend: ScoutAttnBackend) -> dict[str, Any]:
    """The contract's fields, plain numbers and strings only."""
    counters, worker = backend.engine.counters, backend.worker.snapshot()
    digests, older = backend.pool.digests, backend.engine.older
    checksums = backend.pool.host_pages.checksums
    context_used, context_total = (0, 0) if older is None else older.context_pages
    return {
        "policy": backend.policy.name,
        "sglang": VERSION,
        "backend": f"{digests.device.type}-{worker.isa}",
        "transport": backend.transport,
        "ops": chosen(),
        "plan": [
            {"what": what, "count": count, "bytes": size} for what, count, size in backend.plan.rows
        ],
        "tp_size": backend.ranks.size,
        "budget_tokens": backend.config.budget_tokens,
        "page_size": backend.config.page_size_tokens,
        "host_pages_total": backend.allocator.num_pages,
        "host_pages_used": backend.allocator.used_pages,
        "resident_pages": backend.engine.table.resident_pages,
        "resident_slots": backend.plan.num_slots * backend.engine.shape.num_layers,
        "context_pages_total": context_total,
        "context_pages_used": context_used,
        **{name: getattr(counters, name) for name in _TOTALS},
        "cpu_compute_ratio_by_layer": [
            float(c / b) if b else 0.0
            for c, b in zip(
                counters.cpu_pages_by_layer, counters.budget_pages_by_layer, strict=True
            )
        ],
        "recall": {"mode": backend.config.recall} | backend.policy.residency.describe(),
        "gpu_wait_us_by_layer": counters.gpu_wait_us_by_layer.tolist(),
        "fallback_pages": worker.fallback_pages,
        "checksum_failures": 0 if checksums is None else checksums.failures,
        "digests_received": digests.received,
        "digests_computed": digests.computed,
        "worker": {name: getattr(worker, name) for name in _OF_WORKER},
    }


_OF_EACH_RANK = (
    "resident_pages", "selected_pages", "cpu_pages", "cpu_compute_ratio", "recalled_pages",
    "gpu_wait_us", "fallback_pages", "checksum_failures", "digests_received", "digests_computed", "verify_checks",
    "verify_max_rel_error", "verify_unequal_selections", "worker",
)  # fmt: skip


def decode_state_of_ranks(backend: ScoutAttnBackend) -> dict[str, Any]:
    """The same, and in ``ranks`` what differs between tensor-parallel ranks. All ranks must call it."""
    state = decode_state(backend)
    state["ranks"] = backend.ranks.gather({key: state[key] for key in _OF_EACH_RANK})
    return state


def prefill_state(scheduler: Any) -> dict[str, Any]:
    """What a prefill server has to say: its digests."""
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


class Metrics:
    """Publishes the state to Prometheus once a second, so that a dead worker shows without steps."""

    def __init__(self, backend: ScoutAttnBackend, labels: dict[str, str]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._backend = backend
        self._last: dict[str, float] = {}
        self._series: dict[str, Any] = {}
        names = list(labels)
        for key, (kind, text) in _METRICS.items():
            name = f"sglang:kv_offload_{key}"
            made = {
                "counter": lambda *about: Counter(*about),
                "gauge": lambda *about: Gauge(*about, multiprocess_mode="mostrecent"),
                "histogram": lambda *about: Histogram(*about, buckets=_BUCKETS_S),
            }[kind](name, text, names)
            self._series[key] = made.labels(**labels)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scout-metrics", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        state = decode_state(self._backend)
        worker = state["worker"]
        state["worker_restarts"] = worker["restarts"]
        state["worker_up"] = int(worker["state"] == "ready")
        times = self._backend.engine.counters.times
        while times:
            for key, seconds in times.popleft()._asdict().items():
                self._series[key].observe(seconds)
        for key, (kind, _) in _METRICS.items():
            if kind == "histogram":
                continue
            value = float(state[key])
            if kind == "gauge":
                self._series[key].set(value)
            else:
                self._series[key].inc(value - self._last.get(key, 0.0))
                self._last[key] = value

    def _run(self) -> None:
        while not self._stop.wait(PUBLISH_INTERVAL_S):
            try:
                self.publish()
            except Exception:
                # Metrics are not worth a request, and one bad second not all the others.
                logger.exception("cannot publish the kv_offload metrics")

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def start_metrics(backend: ScoutAttnBackend, server_args: Any) -> Metrics | None:
    """Begin to publish if the server was started with ``--enable-metrics``."""
    server_args = adapter.resolved(server_args)
    if not server_args.enable_metrics:
        return None
    labels = {
        "model_name": server_args.served_model_name,
        "engine_type": "decode",
        "tp_rank": str(backend.ranks.rank),
        "pp_rank": "0",
        **(server_args.extra_metric_labels or {}),
    }
    return Metrics(backend, labels)
