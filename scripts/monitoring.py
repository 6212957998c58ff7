#!/usr/bin/env python3
"""Writes docs/monitoring: alert rules for Prometheus and a dashboard for Grafana, from the tables here.

    scripts/monitoring.py [FOLDER]

The metrics are those of python/sglang_scout/plugin/metrics.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "monitoring"


def metric(name: str) -> str:
    """Prometheus before 3.0, and SGLang's router, use ``_`` instead of ``:``."""
    return f'{{__name__=~"sglang[:_]kv_offload_{name}"}}'


def rate(name: str, window: str = "1m") -> str:
    return f"rate({metric(name)}[{window}])"


def increase(name: str, window: str) -> str:
    return f"increase({metric(name)}[{window}])"


class Alert(NamedTuple):
    """``says`` is the action to take, as also given in docs/reference/metrics.md."""

    name: str
    expression: str
    holds: str
    severity: str
    says: str


CPU_SHARE = f"{rate('cpu_pages_total', '5m')} / {rate('selected_pages_total', '5m')}"
HOST_SHARE = f"{metric('host_pages_used')} / {metric('host_pages_total')}"
WAIT_SHARE = f"{rate('gpu_wait_seconds_sum', '5m')} / {rate('step_seconds_sum', '5m')}"

ALERTS = (
    Alert("ScoutWorkerDown", f"{metric('worker_up')} < 1", "30s", "critical",
          "the server computes missing pages itself, slowly: see worker.last_error of /server_info"),
    Alert("ScoutWorkerRestarted", f"{increase('worker_restarts_total', '5m')} > 0", "0s", "warning",
          "the CPU attention process died or hung and was replaced: see worker.last_error of /server_info"),
    Alert("ScoutFallback", f"{rate('fallback_pages_total', '5m')} > 0", "5m", "warning",
          "answers of CPU attention come late or damaged: see refused and late_tickets of /server_info"),
    Alert("ScoutChecksumFailure", f"{increase('checksum_failures_total', '10m')} > 0", "0s", "critical",
          "KV changed in host memory: test the memory if it comes again"),
    Alert("ScoutHostPagesFull", f"{HOST_SHARE} > 0.95", "5m", "warning",
          "requests will be retracted: fewer of them, or a larger --kv-offload-host-gb"),
    Alert("ScoutCpuShareHigh", f"{CPU_SHARE} > 0.25", "10m", "warning",
          "recall does not keep up: more resident_tokens, a lower recall_threshold or more recall_step_mib"),
    Alert("ScoutWaits", f"{WAIT_SHARE} > 0.1", "10m", "warning",
          "the device waits for CPU attention: more CPUs (--kv-offload-cpus) or a lower recall_threshold"),
)  # fmt: skip


class Panel(NamedTuple):
    """``unit`` in Grafana's naming; ``series`` are (legend, expression)."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"p{q}", f"histogram_quantile(0.{q}, sum by (le) ({rate(name + '_bucket')}))")
        for q in (50, 99)
    )


RANK = "rank {{tp_rank}}"
PANELS = (
    Panel("Steps", "ops", ((RANK, rate("steps_total")),)),
    Panel("Step", "s", quantiles("step_seconds")),
    Panel("Wait for CPU attention, a step", "s", quantiles("gpu_wait_seconds")),
    Panel("Boundary, a step", "s", quantiles("boundary_seconds")),
    Panel("Host pages in use", "percentunit", ((RANK, HOST_SHARE),)),
    Panel("Pages on the device", "short", ((RANK, metric("resident_pages")),)),
    Panel("Selected pages computed on the CPU", "percentunit", ((RANK, CPU_SHARE.replace("5m", "1m")),)),
    Panel("Recalls", "Bps", ((RANK, rate("recall_bytes_total")),)),
    Panel("Waits for recalls", "percentunit", ((RANK, rate("recall_wait_seconds_total")),)),
    Panel("CPU attention process", "short", (
        ("up, " + RANK, metric("worker_up")),
        ("restarts, " + RANK, metric("worker_restarts_total")),
    )),
    Panel("Missing pages computed by the server", "ops", ((RANK, rate("fallback_pages_total")),)),
    Panel("Damaged pages", "short", ((RANK, metric("checksum_failures_total")),)),
)  # fmt: skip


def rules() -> str:
    """The rules as YAML, in which JSON strings are valid."""
    lines = ["groups:", "  - name: sglang-scout", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.holds}",
            f"        labels: {{severity: {alert.severity}}}",
            f"        annotations: {{summary: {json.dumps(alert.says)}}}",
        ]
    return "\n".join(lines) + "\n"


def dashboard() -> str:
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": i + 1,
            "title": panel.title,
            "type": "timeseries",
            "datasource": source,
            "gridPos": {"x": i % 3 * 8, "y": i // 3 * 7, "w": 8, "h": 7},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + j), "expr": expression, "legendFormat": legend}
                for j, (legend, expression) in enumerate(panel.series)
            ],
        }
        for i, panel in enumerate(PANELS)
    ]
    variable = {
        "name": "source",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }
    made = {
        "title": "sglang-scout",
        "uid": "sglang-scout",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [variable]},
        "panels": panels,
    }
    return json.dumps(made, indent=1) + "\n"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "alerts.yml").write_text(rules())
    (folder / "grafana.json").write_text(dashboard())


if __name__ == "__main__":
    main()
