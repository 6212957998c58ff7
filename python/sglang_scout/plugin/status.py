"""A decode server's state for operators: ``/server_info``, ``/metrics`` and spans."""

from __future__ import annotations

import logging
import threading
from dataclasses import fields
from functools import partial
from typing import Any

from sglang_scout.engine.stores import Counters, Stat
from sglang_scout.plugin.backend import ScoutAttnBackend, current_backend
from sglang_scout.plugin.hooks import VERSION, adapter, hook

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL_S = 1.0
_OF_WORKER = (
    "pid state restarts cpus cpu_nodes pages remote_pages refused refused_messages local_tickets late_tickets "
    "last_error"
).split()
TRACED = "steps selected_pages cpu_pages recalled_pages gpu_wait_us recall_wait_us".split()
OF_EACH_RANK = (
    "resident_pages selected_pages cpu_pages cpu_compute_ratio recalled_pages gpu_wait_us fallback_pages "
    "checksum_failures digests_received digests_computed verify_checks verify_max_rel_error "
    "verify_unequal_selections worker cpus"
).split()

gauge, counter, histogram = (partial(Stat, kind) for kind in ("gauge", "counter", "histogram"))
METRICS = {
    "budget_tokens": gauge("tokens", "Attended to in full pages, per request, layer and step"),
    "page_size": gauge("tokens", "Size of a page"),
    "host_pages_total": gauge("pages", "Capacity of host memory for KV"),
    "host_pages_used": gauge("pages", "In host memory for requests or the radix cache"),
    "resident_pages": gauge("pages", "In the device's cache, summed over layers"),
    "cpu_compute_ratio": gauge("ratio", "CPU-computed pages divided by the budget, since start"),
    **{x.name: x.metadata["stat"] for x in fields(Counters) if x.metadata},
    "recall_wait_seconds": counter("seconds", "Time that steps waited for recalls"),
    "fallback_pages": counter("pages", "Computed in place of the CPU attention process"),
    "checksum_failures": counter("pages", "Of a layer, found changed in host memory"),
    "context_pages_total": gauge("pages", "Capacity for tokens that heads keep, over all layers"),
    "context_pages_used": gauge("pages", "In use for tokens that heads keep, over all layers"),
    "worker_restarts": counter("starts", "Starts of CPU attention but the first, failed ones too"),
    "worker_up": gauge("1 or 0", "1 while the CPU attention process serves, otherwise 0"),
    "step_seconds": histogram("seconds", "A step, from its boundary or, if later, the last's end"),
    "boundary_seconds": histogram("seconds", "Work of the host before it launches a step"),
    "gpu_wait_seconds": histogram("seconds", "Wait of a step for CPU attention, over all layers"),
}
"""By key of the state, or field of :class:`StepTimes`. prometheus-client adds ``_total`` to a counter's name."""
_BUCKETS_S = tuple(x * 10.0**power for power in range(-4, 1) for x in (1, 2, 5))


def decode_state(backend: ScoutAttnBackend) -> dict[str, Any]:
    """The documented fields, plain numbers and strings only."""
    counters, worker = backend.engine.parts.counters, backend.worker.snapshot()
    pool, table = backend.pool, backend.engine.parts.table
    digests, checksums = pool.digests, pool.host_pages.checksums
    context_used, context_total = backend.engine.selector.context_pages
    ratios = counters.cpu_pages_by_layer / max(1, counters.budget_pages // table.num_layers)
    return {
        "policy": backend.policy.name,
        "sglang": VERSION,
        "backend": f"{digests.device.type}-{worker.isa}",
        "transport": backend.transport,
        "plan": [{"what": name, "count": n, "bytes": b} for name, n, b in pool.plan.rows],
        "cpus": [use._asdict() for use in pool.cpus.plan.rows],
        "tp_size": backend.ranks.size,
        "budget_tokens": backend.config.budget_tokens,
        "page_size": backend.config.page_size_tokens,
        "host_pages_total": backend.allocator.num_pages,
        "host_pages_used": backend.allocator.used_pages,
        "resident_pages": table.resident_pages,
        "resident_pages_by_layer": table.resident_pages_by_layer.tolist(),
        "copying_pages_by_layer": table.metadata.is_pending.sum(1).tolist(),
        "resident_slots": pool.plan.num_slots * pool.shape.num_layers,
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


class Metrics:
    """Publishes the state to Prometheus once a second, so that a dead attention process shows even without steps."""

    def __init__(self, backend: ScoutAttnBackend, server_args: Any) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._backend = backend
        self._last: dict[str, float] = {}
        self._series: dict[str, Any] = {}
        labels = {"model_name": server_args.served_model_name, "engine_type": "decode"}
        labels |= {"tp_rank": str(backend.ranks.rank), "pp_rank": "0"}
        labels |= server_args.extra_metric_labels or {}
        kinds = {
            "counter": Counter,
            "gauge": partial(Gauge, multiprocess_mode="mostrecent"),
            "histogram": partial(Histogram, buckets=_BUCKETS_S),
        }
        for key, stat in METRICS.items():
            name, text = f"sglang:kv_offload_{key}", f"{stat.help} ({stat.unit})."
            made = kinds[stat.kind](name, text, list(labels))
            self._series[key] = made.labels(**labels)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scout-metrics", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        state = decode_state(self._backend)
        worker = state["worker"]
        state |= {"worker_restarts": worker["restarts"], "worker_up": worker["state"] == "ready"}
        state["recall_wait_seconds"] = state["recall_wait_us"] / 1e6
        times = self._backend.engine.parts.counters.times
        while times:
            for key, seconds in times.popleft()._asdict().items():
                self._series[key].observe(seconds)
        for key, stat in METRICS.items():
            if stat.kind == "gauge":
                self._series[key].set(state[key])
            elif stat.kind == "counter":
                self._series[key].inc(state[key] - self._last.get(key, 0))
                self._last[key] = state[key]

    def _run(self) -> None:
        while not self._stop.wait(PUBLISH_INTERVAL_S):
            try:
                self.publish()
            except Exception:  # must fail no request, nor end publishing
                logger.exception("cannot publish the kv_offload metrics; trying again")

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@hook("model_executor.model_runner.ModelRunner.init_attention_backends", "after")
def after_init_attention_backends(_, runner) -> None:
    """With `--enable-metrics`, publish the state to `/metrics`."""
    server_args = adapter.resolved(runner.server_args)
    if server_args.enable_metrics:
        current_backend().metrics = Metrics(current_backend(), server_args)


@hook("observability.trace.TraceReqContext.trace_slice", "before")
def before_trace_slice(context, slice, *_, **__) -> None:
    """With `--enable-trace`: add step counters as attributes to each token's span."""
    # They are the batch's, since the request's previous token.
    if slice.slice_name == "decode_loop":
        counters = current_backend().engine.parts.counters
        now = {name: getattr(counters, name) for name in TRACED}
        before = getattr(context, "kv_offload_before", now)
        context.kv_offload_before = now
        slice.attrs.update({f"kv_offload.{name}": now[name] - before[name] for name in TRACED})


@hook("managers.scheduler.Scheduler.get_internal_state", "after")
def after_get_internal_state(result, scheduler, *args, **kwargs):
    """Add the state to `/server_info`."""
    backend = current_backend()
    result.internal_state["kv_offload"] = state = decode_state(backend)
    # All ranks are asked at once.
    state["ranks"] = backend.ranks.gather({key: state[key] for key in OF_EACH_RANK})
    return result
