"""Checks decode steps of a small model: verified layer by layer, graph replay equals eager, no host syncs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from benchmark.decode.harness import Harness, Store
from benchmark.decode.model import PAGE, SIZES, DummyModel, QueryDrift, Requests

MODES: Any = {"verified": "verify", "replayed": "graph", "off": "strict", "fp8": "verify"}
"""Of the harness, by kind of step."""


def check(device: str) -> list[str]:
    """Problems of the first failing batch size; empty if there are none.

    Reports each kind of step as soon as it has run, so that a truncated log shows how far it got.
    """
    steps = {1: 4, 3: 4} if device == "cpu" else {1: 40, 16: 16}
    for batch, count in steps.items():
        wrong = []
        for kind, found in findings(device, batch, count):
            print(f"batch {batch}, {kind}: {'; '.join(found) or 'equal'}", flush=True)
            wrong += [f"batch {batch}, {kind}: {line}" for line in found]
        if wrong:
            return wrong
    return []


def findings(device: str, batch: int, steps: int) -> Iterator[tuple[str, list[str]]]:
    """Each kind of step of a batch, with its problems."""
    size = SIZES["tiny"]
    expected: list[torch.Tensor] = []
    for kind in MODES:
        if (kind == "replayed" and device == "cpu") or (kind == "fp8" and batch == 1):
            continue
        outputs, wrong = [], []
        store = Store(
            size,
            pages=1 + batch * 28,
            batch=batch,
            budget_pages=4,
            dtype=torch.float32,
            device=device,
            cpus=sorted(os.sched_getaffinity(0))[:2],
            fp8=torch.float8_e4m3fn if kind == "fp8" else None,
        )
        harness = None
        try:
            harness = Harness(
                store,
                DummyModel(size, torch.float32, device),
                QueryDrift(size, batch, 0.9, device),
                Requests(batch, 20 * PAGE - 3, 4 * PAGE),
                settings='{"recall": "%s"}' % ("off" if kind == "off" else "fixed"),
                mode=MODES[kind],
            )
            for _ in range(steps):
                harness.step()  # with "off" it must not synchronize
                outputs.append(harness.out.cpu())
                if faults := harness.engine.transport.faults():  # later steps are invalid too
                    raise RuntimeError(f"step {len(outputs) - 1}: {'; '.join(faults)}")
            counters = harness.engine.parts.counters
            if counters.cpu_pages == 0:
                wrong.append("no page was missing, nothing was tested")
            error = counters.verify_max_rel_error
            if kind in ("verified", "fp8") and not 0 < error <= 1e-5:
                wrong.append(f"relative error {error:g} against the plain reference")
        except RuntimeError as failure:
            wrong.append(str(failure))
        finally:
            if harness is not None:
                harness.close()
            store.close()
        if kind == "verified":
            expected = outputs
        elif kind == "replayed":
            differ = (not torch.equal(a, b) for a, b in zip(expected, outputs, strict=False))
            if (step := next((i for i, other in enumerate(differ) if other), None)) is not None:
                wrong.append(f"step {step} differs from the eager one")
        yield kind, wrong
