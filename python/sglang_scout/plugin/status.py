"""A decode server's state for operators: ``/server_info``, ``/metrics`` and spans."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import fields
from functools import partial
from statistics import fmean
from typing import Any

from sglang_scout import __version__
from sglang_scout.engine.stores import Counters, Stat
from sglang_scout.plugin.backend import ScoutAttnBackend, current_backend
from sglang_scout.plugin.hooks import VERSION, adapter, hook

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL_S = 1.0
_OF_WORKER = (
    "pid state restarts restart_backoff_seconds cpus cpu_nodes pages remote_pages refused refused_messages "
    "local_tickets late_tickets last_error"
).split()
TRACED = "steps selected_pages cpu_pages recalled_pages gpu_wait_us recall_wait_us".split()
OF_EACH_RANK = (
    "resident_pages selected_pages cpu_pages cpu_compute_ratio recalled_pages gpu_wait_us fallback_pages "
    "checksum_failures digests_received digests_computed verify_checks verify_max_rel_error "
    "verify_unequal_selections worker cpus"
).split()

gauge, counter, histogram = (partial(Stat, kind) for kind in ("gauge", "counter", "histogram"))
INFO = "version sglang policy digest recall backend transport".split()
METRICS = {
    "info": gauge("always 1", f"Has the labels {', '.join(INFO)}"),
    "budget_tokens": gauge("tokens", "Attended to in full pages, per request, layer and step"),
    "page_size_tokens": gauge("tokens", "Size of a page"),
    "host_pages_capacity": gauge("pages", "Capacity of host memory for KV"),
    "host_pages_used": gauge("pages", "In host memory for requests or the radix cache"),
    "resident_pages_capacity": gauge("pages", "Capacity of the device's cache, over all layers"),
    "resident_pages": gauge("pages", "In the device's cache, summed over layers"),
    **{x.name: x.metadata["stat"] for x in fields(Counters) if x.metadata},
    "recall_wait_seconds": counter("seconds", "Time that steps waited for recalls"),
    "fallback_pages": counter("pages", "Computed in place of the CPU attention process"),
    "checksum_failures": counter("pages", "Of a layer, found changed in host memory"),
    "context_pages_capacity": gauge("pages", "Capacity for tokens that heads keep, all layers"),
    "context_pages_used": gauge("pages", "In use for tokens that heads keep, over all layers"),
    "worker_restarts": counter("starts", "Starts of CPU attention but the first, failed ones too"),
    "worker_late_tickets": counter("layers", "Results of CPU attention missing after 10 seconds"),
    "worker_restart_backoff_seconds": gauge("seconds", "Pause before the next start, otherwise 0"),
    "worker_up": gauge("1 or 0", "1 while the CPU attention process serves, otherwise 0"),
    "predicted_query_cosine": gauge("-1 to 1", "To the real queries, mean over layers"),
    "admission_delay_seconds": histogram("seconds", "From the KV's arrival to the first step"),
    "step_seconds": histogram("seconds", "A step, from its boundary or, if later, the last's end"),
    "boundary_seconds": histogram("seconds", "Work of the host before it launches a step"),
    "gpu_wait_seconds": histogram("seconds", "Wait of a step for CPU attention, over all layers"),
}
"""Histograms by key of :meth:`Counters.observe`. prometheus-client adds ``_total`` to a counter's name."""
_BUCKETS_S = tuple(x * 10.0**power for power in range(-4, 2) for x in (1, 2, 5))


def decode_state(backend: ScoutAttnBackend) -> dict[str, Any]:
    """The documented fields, plain numbers and strings only."""
    counters, worker = backend.engine.parts.counters, backend.worker.snapshot()
    pool, table = backend.pool, backend.engine.parts.table
    digests, checksums = pool.digests, pool.host_pages.checksums
    context_used, context_capacity = backend.engine.selector.context_pages
    cosines = counters.query_cosine_by_layer.tolist()
    ratios = counters.cpu_pages_by_layer / max(1, counters.budget_pages // table.num_layers)
    return {
        "version": __version__,
        "sglang": VERSION,
        "policy": backend.policy.name,
        "digest": backend.policy.rule.digest.name,
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
        "context_pages_capacity": context_capacity,
        "context_pages_used": context_used,
        **counters.totals(),
        "cpu_compute_ratio": counters.cpu_compute_ratio,
        "cpu_compute_ratio_by_layer": ratios.tolist(),
        "recall": {"mode": backend.config.recall} | backend.policy.residency.describe(),
        "query_cosine_by_layer": [None if math.isnan(x) else round(x, 4) for x in cosines],
        "gpu_wait_us_by_layer": counters.gpu_wait_us_by_layer.tolist(),
        "fallback_pages": worker.fallback_pages,
        "checksum_failures": 0 if checksums is None else checksums.failures,
        "digests_received": digests.received,
        "digests_computed": digests.computed,
        "worker": {name: getattr(worker, name) for name in _OF_WORKER},
    }


def _values(state: dict[str, Any]) -> dict[str, Any]:
    """By name of gauges and counters."""
    cosines = [x for x in state["query_cosine_by_layer"] if x is not None]
    of_worker = {f"worker_{key}": value for key, value in state["worker"].items()}
    renamed = {
        "info": 1,
        "page_size_tokens": state["page_size"],
        "host_pages_capacity": state["host_pages_total"],
        "resident_pages_capacity": state["resident_slots"],
        "recall_wait_seconds": state["recall_wait_us"] / 1e6,
        "worker_up": state["worker"]["state"] == "ready",
        "predicted_query_cosine": fmean(cosines or [math.nan]),
    }
    return state | of_worker | renamed


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
        facts = decode_state(backend)
        facts["recall"] = facts["recall"]["mode"]
        for key, stat in METRICS.items():
            name, text = f"sglang:kv_offload_{key}", f"{stat.help} ({stat.unit})."
            own = labels | {label: facts[label] for label in INFO if key == "info"}
            self._series[key] = kinds[stat.kind](name, text, list(own)).labels(**own)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scout-metrics", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        engine = self._backend.engine
        engine.compare_next = True
        observed = engine.parts.counters.observed
        while observed:
            key, seconds = observed.popleft()
            self._series[key].observe(seconds)
        values = _values(decode_state(self._backend))
        for key, stat in METRICS.items():
            if stat.kind == "gauge":
                self._series[key].set(values[key])
            elif stat.kind == "counter":
                self._series[key].inc(values[key] - self._last.get(key, 0))
                self._last[key] = values[key]

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
