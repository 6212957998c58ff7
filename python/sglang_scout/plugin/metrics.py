"""``/metrics``: the counters of ``/server_info`` and step times, for Prometheus."""

from __future__ import annotations

import logging
import threading
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_scout.engine.counters import Counters, Stat
from sglang_scout.plugin.release import adapter
from sglang_scout.plugin.status import decode_state

if TYPE_CHECKING:
    from sglang_scout.plugin.backend import ScoutAttnBackend

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL_S = 1.0

gauge, counter, histogram = (partial(Stat, kind) for kind in ("gauge", "counter", "histogram"))
METRICS = {
    "budget_tokens": gauge("tokens", "Attended to in full pages, per request, layer and step"),
    "page_size": gauge("tokens", "Size of a page"),
    "host_pages_total": gauge("pages", "Capacity of host memory for KV"),
    "host_pages_used": gauge("pages", "In host memory for requests or the radix cache"),
    "resident_pages": gauge("pages", "In the device's cache, summed over layers"),
    "cpu_compute_ratio": gauge(
        "ratio", "Pages computed on the CPU divided by the budget, since start"
    ),
    **{x.name: x.metadata["stat"] for x in fields(Counters) if x.metadata},
    "recall_wait_seconds": counter("seconds", "Time that steps waited for recalls"),
    "fallback_pages": counter(
        "pages", "Computed by the server in place of the CPU attention process"
    ),
    "checksum_failures": counter("pages", "Of a layer, found changed in host memory"),
    "context_pages_total": gauge("pages", "Capacity for tokens that heads keep, over all layers"),
    "context_pages_used": gauge("pages", "In use for tokens that heads keep, over all layers"),
    "worker_restarts": counter(
        "starts",
        "Starts of the CPU attention process but the first, failed ones included",
    ),
    "worker_up": gauge("1 or 0", "1 while the CPU attention process serves, otherwise 0"),
    "step_seconds": histogram(
        "seconds", "A step, from its boundary or, if later, the last step's end"
    ),
    "boundary_seconds": histogram("seconds", "Work of the host before it launches a step"),
    "gpu_wait_seconds": histogram("seconds", "Wait of a step for CPU attention, over all layers"),
}
"""By key of the state, or field of :class:`StepTimes`. prometheus-client adds ``_total`` to a counter's name."""
_BUCKETS_S = tuple(x * 10.0**power for power in range(-4, 1) for x in (1, 2, 5))


class Metrics:
    """Publishes the state to Prometheus once a second, so that a dead attention process shows even without steps."""

    def __init__(self, backend: ScoutAttnBackend, labels: dict[str, str]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._backend = backend
        self._last: dict[str, float] = {}
        self._series: dict[str, Any] = {}
        kinds = {"counter": Counter, "gauge": partial(Gauge, multiprocess_mode="mostrecent")}
        kinds["histogram"] = partial(Histogram, buckets=_BUCKETS_S)
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
        times = self._backend.engine.counters.times
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
            except Exception:
                # A metrics failure must fail no request, nor end publishing.
                logger.exception(
                    "cannot publish the kv_offload metrics; trying again in %g s",
                    PUBLISH_INTERVAL_S,
                )

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def start_metrics(backend: ScoutAttnBackend, server_args: Any) -> Metrics | None:
    """Start publishing if the server has ``--enable-metrics``."""
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
