"""Alert rules for Prometheus and a dashboard for Grafana. `scripts/reference.py` writes them to docs/monitoring.

The metrics are those of python/sglang_scout/plugin/metrics.py.
"""

from __future__ import annotations

import json
from typing import NamedTuple

RUNBOOK = "docs/monitoring/README.md"


def metric(name: str) -> str:
    """Prometheus before 3.0, and SGLang's router, use ``_`` instead of ``:``."""
    return f'{{__name__=~"sglang[:_]kv_offload_{name}"}}'


def rate(name: str, window: str = "1m") -> str:
    return f"rate({metric(name)}[{window}])"


def increase(name: str, window: str) -> str:
    return f"increase({metric(name)}[{window}])"


class Alert(NamedTuple):
    """A rule, and its entry in the runbook.

    Attributes:
        expression, holds, severity: of the rule.
        when: the same in words.
        says: the message.
        means: what happens then.
        todo: what the operator does.
    """

    name: str
    expression: str
    holds: str
    severity: str
    when: str
    says: str
    means: str
    todo: str


# Without selections (hgca, or no requests) there is no share.
CPU_SHARE = f"{rate('cpu_pages_total', '5m')} / ({rate('selected_pages_total', '5m')} > 0)"
HOST_SHARE = f"{metric('host_pages_used')} / {metric('host_pages_total')}"
WAIT_SHARE = f"{rate('gpu_wait_seconds_sum', '5m')} / {rate('step_seconds_sum', '5m')}"

ALERTS = (
    Alert(
        "ScoutWorkerDown",
        f"{metric('worker_up')} < 1",
        "30s",
        "critical",
        "`worker_up` is 0 for 30 seconds",
        "The CPU attention process is down.",
        "Output stays correct, but the decode server computes the missing pages itself, which is slower. It keeps "
        "trying to start a new process, at most 30 seconds after the last try.",
        "Read `worker.last_error` in `/server_info` and free what it names, for example memory, file descriptors or "
        "processes; the next start then succeeds. If the error begins with `supervisor:`, no start follows: restart "
        "the decode server and report the error.",
    ),
    Alert(
        "ScoutWorkerRestarted",
        f"{increase('worker_restarts_total', '5m')} > 0",
        "0s",
        "warning",
        "`worker_restarts_total` grew in the last 5 minutes",
        "The CPU attention process died or hung, and was started again.",
        "Requests continue with correct output; the decode server computes the missing pages until the new process "
        "is ready. A start that fails is counted too.",
        "Read `worker.last_error` in `/server_info`. If it happens again, look in the kernel's log (`dmesg`) for "
        "the OOM killer, and check that no CPU quota stops the process. Report a crash.",
    ),
    Alert(
        "ScoutFallback",
        f"{rate('fallback_pages_total', '5m')} > 0",
        "5m",
        "warning",
        "`fallback_pages_total` grows for 5 minutes",
        "The decode server computes missing pages in place of the CPU attention process.",
        "Results of CPU attention are late or damaged, or the process is not ready. Output stays correct, but steps "
        "take longer.",
        "If `worker_up` is 0, see ScoutWorkerDown. Otherwise read `worker` in `/server_info`. If `late_tickets` "
        "grows, results take longer than 10 seconds (with CUDA graphs the server ends instead): look for a CPU quota, "
        "or for other programs on the CPUs in `worker.cpus`. If `refused` grows, the data that the process receives or "
        "returns is damaged: report it. If only `local_tickets` grows, the process was still busy with the step "
        "before: give it more CPUs.",
    ),
    Alert(
        "ScoutChecksumFailure",
        f"{increase('checksum_failures_total', '10m')} > 0",
        "0s",
        "critical",
        "`checksum_failures_total` grew in the last 10 minutes",
        "KV changed in host memory.",
        "`page_checksums` found a damaged page. The running requests that use it ended with an error; other requests "
        "are unaffected.",
        "A single event can be a random bit flip. If it happens again, take the host out of service and test its "
        "memory.",
    ),
    Alert(
        "ScoutHostPagesFull",
        f"{HOST_SHARE} > 0.95",
        "5m",
        "warning",
        "more than 95 % of the host pages are in use for 5 minutes",
        "Host pages are nearly used up.",
        "When no page is free, SGLang retracts running requests, which wait and resume later. Pages of the radix "
        "cache count as used, but are freed first.",
        "With `--disaggregation-decode-enable-radix-cache` this is normal while SGLang's `sglang:num_retracted_reqs` "
        "stays 0. Otherwise lower `--max-running-requests` or raise `--kv-offload-host-gb`.",
    ),
    Alert(
        "ScoutCpuShareHigh",
        f"{CPU_SHARE} > 0.25",
        "10m",
        "warning",
        "the CPU computes more than 25 % of the selected pages for 10 minutes",
        "Recall does not keep up.",
        "CPU attention computes more pages than it is meant to, and steps may have to wait for it.",
        "Lower `recall_threshold`, raise `recall_step_mib` unless steps wait for recalls, or raise `resident_tokens`.",
    ),
    Alert(
        "ScoutWaits",
        f"{WAIT_SHARE} > 0.1",
        "10m",
        "warning",
        "steps spend more than 10 % of their time waiting for CPU attention, for 10 minutes",
        "The device waits for CPU attention.",
        "CPU attention needs longer for a layer's missing pages than the device needs for the layer before. Layer 0 "
        "and `exact_layers` always wait.",
        "Give CPU attention more CPUs (`--kv-offload-cpus`) or fewer pages: lower `recall_threshold` or raise "
        "`resident_tokens`. `sglang-scout report` shows which layers wait.",
    ),
)


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
    Panel("Decode steps per second", "ops", ((RANK, rate("steps_total")),)),
    Panel("Step time", "s", quantiles("step_seconds")),
    Panel("Wait for CPU attention per step", "s", quantiles("gpu_wait_seconds")),
    Panel("Host work before a step", "s", quantiles("boundary_seconds")),
    Panel("Host pages in use", "percentunit", ((RANK, HOST_SHARE),)),
    Panel("Pages resident on the device", "short", ((RANK, metric("resident_pages")),)),
    Panel("Selected pages computed on the CPU", "percentunit", ((RANK, CPU_SHARE.replace("5m", "1m")),)),
    Panel("Recalled bytes per second", "Bps", ((RANK, rate("recall_bytes_total")),)),
    Panel("Time spent waiting for recalls", "percentunit", ((RANK, rate("recall_wait_seconds_total")),)),
    Panel("CPU attention process", "short", (
        ("up, " + RANK, metric("worker_up")),
        ("restarts, " + RANK, metric("worker_restarts_total")),
    )),
    Panel("Pages computed in place of the CPU attention process", "ops", ((RANK, rate("fallback_pages_total")),)),
    Panel("Pages changed in host memory", "short", ((RANK, metric("checksum_failures_total")),)),
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
            "        annotations:",
            f"          summary: {json.dumps(alert.says)}",
            f"          description: {json.dumps(f'{alert.means} {alert.todo}')}",
            f"          runbook: {json.dumps(f'{RUNBOOK}#{alert.name.lower()}')}",
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
