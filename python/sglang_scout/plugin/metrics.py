"""``/metrics``: the counters of ``/server_info`` and step times, for Prometheus."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from sglang_scout.plugin.line import adapter
from sglang_scout.plugin.status import decode_state

if TYPE_CHECKING:
    from sglang_scout.plugin.backend import ScoutAttnBackend

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL_S = 1.0

# state key -> (kind, help). A counter's name gets the suffix _total from prometheus-client.
METRICS = {
    "budget_tokens": ("gauge", "Tokens that a request attends to in full pages, per layer and step."),
    "page_size": ("gauge", "Tokens in a page."),
    "host_pages_total": ("gauge", "Capacity of host memory for KV, in pages."),
    "host_pages_used": ("gauge", "Host pages that requests or the radix cache hold."),
    "resident_pages": ("gauge", "Pages in the device's cache, summed over layers."),
    "cpu_compute_ratio": ("gauge", "CPU compute ratio since start: pages computed on the CPU divided by the budget."),
    "steps": ("counter", "Decode steps."),
    "dense_steps": ("counter", "Decode steps with full attention: all pages were resident, few beyond the budget."),
    "selected_pages": ("counter", "Pages selected, summed over requests, layers and steps."),
    "cpu_pages": ("counter", "Pages that CPU attention computed because they were not resident."),
    "fetched_pages": ("counter", "Pages copied to the device before the layer that selected them."),
    "recalled_pages": ("counter", "Pages copied to the device by recalls."),
    "recall_bytes": ("counter", "Bytes copied to the device by recalls."),
    "recall_wait_seconds": ("counter", "Time that steps waited for recalls."),
    "fallback_pages": ("counter", "Pages that the decode server computed in place of the CPU attention process."),
    "checksum_failures": ("counter", "Pages of a layer that were found changed in host memory."),
    "context_pages_total": ("gauge", "Capacity for tokens that heads keep, in pages, summed over layers."),
    "context_pages_used": ("gauge", "Pages in use for tokens that heads keep, summed over layers."),
    "raised_thresholds": ("counter", "Heads without room for all tokens that they would keep."),
    "worker_restarts": ("counter", "Starts of the CPU attention process after the first, failed ones included."),
    "worker_up": ("gauge", "1 while the CPU attention process serves, otherwise 0."),
    "step_seconds": ("histogram", "Duration of a step, from its boundary or, if later, the end of the step before."),
    "boundary_seconds": ("histogram", "Time that the host works before it launches a step."),
    "gpu_wait_seconds": ("histogram", "Time that a step waited for CPU attention, summed over layers."),
}  # fmt: skip
_BUCKETS_S = tuple(x * 10.0**power for power in range(-4, 1) for x in (1, 2, 5))


class Metrics:
    """Publishes the state to Prometheus once a second, so that a dead attention process shows even without steps."""

    def __init__(self, backend: ScoutAttnBackend, labels: dict[str, str]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._backend = backend
        self._last: dict[str, float] = {}
        self._series: dict[str, Any] = {}
        names = list(labels)
        for key, (kind, text) in METRICS.items():
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
        state["recall_wait_seconds"] = state["recall_wait_us"] / 1e6
        times = self._backend.engine.counters.times
        while times:
            for key, seconds in times.popleft()._asdict().items():
                self._series[key].observe(seconds)
        for key, (kind, _) in METRICS.items():
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
