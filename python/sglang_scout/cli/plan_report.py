"""What ``sglang-scout plan`` prints: text for people or one JSON object."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from sglang_scout.cli.plan import GIB, Plan, Request, make_plan
from sglang_scout.cli.table import columns, gb, gib


def _needed(plan: Plan, requests: int) -> dict[str, int]:
    """Bytes that ``requests`` need: of host pages, and on the device."""
    sizes = plan.sizes
    pages = sizes.host_pages(requests)
    host_bytes = pages * sizes.kv_bytes_per_page
    return {"host_pages": pages, "host_bytes": host_bytes, "device": sizes.device_bytes(requests)}


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain numbers; sizes in bytes."""
    requests = plan.requests or plan.offload.requests
    needed = _needed(plan, requests)
    result: dict[str, Any] = {
        "model": asdict(plan.model),
        **asdict(plan.sizes),
        "device_bytes_per_request": plan.sizes.device_bytes_per_request,
        "device_bytes_once": plan.sizes.device_bytes_once,
        "host_bytes": plan.host_bytes,
        "gpu_bytes": plan.gpu_bytes,
        "gpu_bytes_after_weights": plan.gpu_kv_bytes,
        "requests": requests,
        "requests_need_host_pages": needed["host_pages"],
        "requests_need_host_bytes": needed["host_bytes"],
        "requests_need_device_bytes": needed["device"],
        "requests_need_worker_bytes": plan.worker_bytes,
        "fits": plan.fits,
    }
    for name, fit in (("offload", plan.offload), ("stock", plan.stock)):
        if fit is not None:
            result[name] = {**asdict(fit), "requests": fit.requests, "limited_by": fit.limited_by}
    return result


def as_text(plan: Plan) -> str:
    """The plan for people."""
    model, sizes = plan.model, plan.sizes
    blocks = [
        columns(
            [
                ("model", model.describe()),
                ("weights", f"{gib(model.weight_bytes)} ({model.weight_source})"),
                ("KV per token", f"{sizes.kv_bytes_per_token} bytes, {model.dtype}"),
                (
                    "page",
                    f"{sizes.page_size_tokens} tokens: {gib(sizes.kv_bytes_per_page)} of KV, "
                    f"{gib(sizes.digest_bytes_per_page)} of digest, over all layers",
                ),
            ]
        ),  # fmt: skip
        f"One request of {sizes.context_tokens} tokens ({sizes.host_pages_per_request} pages)\n"
        + columns(_request_rows(plan), right=(1, 2), indent=2),
        "Requests that fit at once\n" + columns(_fit_rows(plan), right=(1, 2), indent=2),
        _verdict(plan),
    ]
    return "\n\n".join(blocks)


def _request_rows(plan: Plan) -> list[tuple[str, ...]]:
    sizes = plan.sizes
    where = "GPU" if plan.gpu_bytes is not None else "device"
    parts = (
        ("host: KV pages", sizes.kv_bytes_per_request, ""),
        (f"{where}: digests", sizes.digest_bytes_per_request, "one for each page"),
        (f"{where}: input buffers", sizes.input_bytes_per_request, "of SGLang, for each token"),
        (f"{where}: resident pages", sizes.resident_bytes_per_request,
         f"budget of {sizes.budget_tokens} tokens"),
        (f"{where}: page being filled", sizes.tail_bytes_per_request, ""),
        (f"{where}: together", sizes.device_bytes_per_request,
         f"and {gb(sizes.device_bytes_once)} once, for recalls under way"),
    )  # fmt: skip
    return [(name, gb(size), gib(size), note) for name, size, note in parts]


def _fit_rows(plan: Plan) -> list[tuple[str, ...]]:
    host_note = "" if plan.host_bytes_given else ", half of what is available here"
    rows: list[tuple[str, ...]] = [("", "offload", "stock")]
    stock = plan.stock
    rows.append(
        (f"by host memory ({gib(plan.host_bytes)}{host_note})", str(plan.offload.by_host), "-")
    )
    if plan.gpu_kv_bytes is not None and stock is not None:
        rows.append(
            (f"by GPU memory ({gib(plan.gpu_kv_bytes)} after the weights)",
             str(plan.offload.by_gpu), str(stock.by_gpu))
        )  # fmt: skip
    return rows


def _verdict(plan: Plan) -> str:
    requests = plan.requests or plan.offload.requests
    binds = plan.offload.limited_by.replace("gpu", "GPU")
    if plan.requests is None:
        lines = [f"{_count(requests)} at once; {binds} is what limits."]
    elif plan.fits:
        lines = [f"{_count(requests)} would fit; {binds} is what limits more."]
    else:
        lines = [f"{_count(requests)} would not fit: {binds} is too small."]
    needed = _needed(plan, max(requests, 1))
    # Rounded up: a tenth less would be a page short.
    host_gib = math.ceil(needed["host_bytes"] / GIB * 10) / 10
    place = "GPU memory" if plan.gpu_bytes is not None else "device memory"
    lines.append(
        f"For {_count(max(requests, 1))}: --max-running-requests {max(requests, 1)} "
        f"--kv-offload-host-gb {host_gib:.1f},\n"
        f"and {gib(needed['device'])} of {place} beside the weights.\n"
        f"The worker's ring and partial results take up to {gib(plan.worker_bytes)} of host memory more."
    )
    if plan.gpu_bytes is None:
        lines.append(
            "No --gpu-gb given: with --device cpu, device memory is host memory too, on top of "
            "--kv-offload-host-gb."
        )
    if plan.sizes.context_tokens > plan.model.max_context_tokens:
        lines.append(
            f"The model's config.json allows {plan.model.max_context_tokens} tokens; more needs "
            "its RoPE scaling."
        )
    return "\n".join(lines)


def _count(requests: int) -> str:
    return f"{requests} request" + ("" if requests == 1 else "s")


def run(request: Request, *, as_json: bool = False) -> int:
    """Prints the plan. Returns 0, or 1 if the asked number of requests does not fit.

    Raises:
        ConfigError: see :func:`make_plan`.
    """
    plan = make_plan(request)
    print(json.dumps(as_dict(plan), indent=2) if as_json else as_text(plan))
    return 0 if plan.fits else 1
