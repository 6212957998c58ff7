"""``sglang-scout report``: a step log as a table or one JSON object."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from typing import Any

import numpy as np

from sglang_scout.cli import columns, gb
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.profile import COLD_STEPS, StepLogFile, ratios_by_age, read_step_log

DESCRIPTION = (
    "Show where the time of a decode step goes, and each layer's CPU compute ratio and wait. It reads a "
    'step log, which a decode server writes with --kv-offload-config \'{"step_log": "FILE"}\'. For a '
    'timeline of the first steps set the key {"trace": "FILE"} instead and open the file in ui.perfetto.dev.'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step_log", metavar="STEP_LOG", help="step log of a decode server")


def run(args: argparse.Namespace) -> int:
    found = report_of(read_step_log(args.step_log))
    print(json.dumps(found) if args.json else as_text(found))
    return 0


def report_of(log: StepLogFile) -> dict[str, Any]:
    """Means over the steps of a log that are followed by another of the same requests. Raises ConfigError if there are
    none."""
    # If all requests of the next step are new, the server may have been idle in between.
    pairs = [(step, after) for step, after in pairwise(log.steps) if any(after.ages)]
    if not pairs:
        raise ConfigError(
            "report: the step log has no two consecutive steps of a request; record it while requests are running"
        )
    steps = [step for step, _ in pairs]
    period = np.array([after.start_us - step.start_us for step, after in pairs])
    waited = np.array([step.gpu_wait_us for step in steps])
    recall_wait = np.array([step.recall_wait_us for step in steps])
    inside = np.minimum([step.step_us for step in steps], period)
    ratios, rows = (x[..., COLD_STEPS:] for x in ratios_by_age(log))
    ratio = (ratios * rows).sum(axis=1) / max(1, rows.sum())
    return {
        "policy": log.facts.policy,
        "recall": log.facts.recall,
        "steps": len(steps),
        "requests": float(np.mean([len(step.ages) for step in steps])),
        "period_us": float(period.mean()),
        "cpu_wait_us": float(waited.sum(axis=1).mean()),
        "recall_wait_us": float(recall_wait.mean()),
        "rest_us": float((inside - waited.sum(axis=1) - recall_wait).mean()),
        "between_us": float((period - inside).mean()),
        # CPU compute ratio of requests beyond the budget, without their first steps.
        "ratio_by_layer": ratio.round(4).tolist(),
        "cpu_wait_us_by_layer": waited.mean(axis=0).round(1).tolist(),
        "recalled_pages": float(np.mean([step.recalled_pages for step in steps])),
        "recall_bytes": float(np.mean([step.recall_bytes for step in steps])),
    }


def as_text(found: dict[str, Any]) -> str:
    shares: list[tuple[str, ...]] = [("decode step", "us", "share")]
    for name, text in (
        ("cpu_wait_us", "waiting for missing pages"),
        ("recall_wait_us", "waiting for recalled pages"),
        ("rest_us", "rest of the step"),
        ("between_us", "between steps"),
        ("period_us", "total"),
    ):
        us = found[name]
        shares.append((text, f"{us:.0f}", f"{100 * us / found['period_us']:.1f} %"))
    layers: list[tuple[str, ...]] = [("layer", "CPU compute ratio", "wait, us")]
    for layer, ratio in enumerate(found["ratio_by_layer"]):
        layers.append((str(layer), f"{ratio:.3f}", f"{found['cpu_wait_us_by_layer'][layer]:.0f}"))
    layers.append(("mean", f"{np.mean(found['ratio_by_layer']):.3f}", ""))
    of_requests = f"{found['steps']} steps of {found['requests']:.1f} requests on average"
    head = f"{of_requests}; policy {found['policy']}, recall {found['recall']}"
    last = f"Recalled per step: {found['recalled_pages']:.1f} pages, {gb(found['recall_bytes'])}."
    tables = columns(shares, right=(1, 2)), columns(layers, right=(0, 1, 2))
    return "\n\n".join([head, *tables, last])
