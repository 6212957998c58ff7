"""``sglang-scout plan``: memory per token and per request, how many requests fit, and the predicted step time; text or
one JSON object."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglang_scout.cli import GIB, columns, gb, gib
from sglang_scout.cli.step_model import CAVEAT, DEVICES, Prediction, find_device, has_model, predict
from sglang_scout.core.config import DEFAULT_BUDGET_TOKENS
from sglang_scout.core.flags import DTYPES, FP8_KV

if TYPE_CHECKING:
    from sglang_scout.cli.sizes import Plan

DESCRIPTION = (
    "Show how much memory the KV of a model takes and how many requests fit. It reads the model's config.json and "
    "the sizes of its files, and loads no weights. With --gpu it also predicts the time of a decode step, with stock "
    "SGLang and with offload, from bytes and bandwidths. GiB is 2**30 bytes, as in --kv-offload-host-gb; GB is "
    "10**9. The exit code is 1 if the requests do not fit."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, text: str, kind: type = int, metavar: str | None = "N", **more: Any) -> None:
        parser.add_argument(*flag.split(), help=text, type=kind, metavar=metavar, **more)

    where = "folder of the model, or the name of one that was downloaded from the Hugging Face Hub"
    add("--model-path", where, str, "DIR", required=True)
    tokens = "tokens of one request, prompt and answer (default: the model's maximum)"
    add("--context --context-tokens", tokens, dest="context_tokens")
    add("--requests", "concurrent requests to plan for (default: as many as fit)")
    policy = {"default": "scout", "dest": "policy"}
    add("--kv-offload", "as the server's flag (default: scout)", str, "POLICY", **policy)
    keys = {"default": "{}", "dest": "config"}
    add("--kv-offload-config", "as the server's flag", str, "JSON", **keys)
    budget = "as the server's flag, a multiple of 32 (default: {}, unless the policy has its own)"
    of_flag = {"metavar": "TOKENS", "dest": "budget_tokens"}
    add("--kv-offload-budget --budget", budget.format(DEFAULT_BUDGET_TOKENS), **of_flag)
    host = "the server's --kv-offload-host-gb, in GiB (default: about the server's, half of the available memory)"
    add("--host-gb", host, float, "GB", dest="host_gib")
    gpu = (
        f"GPU to predict step times for, and whose memory is the default of --gpu-gb: {', '.join(DEVICES)}, or a JSON "
        "file with a device's rates (python/sglang_scout/cli/step_model.py names them)"
    )
    add("--gpu", gpu, str, "NAME")
    memory = "memory of one GPU in GiB (default: that of --gpu; without both, only host memory limits the requests)"
    add("--gpu-gb", memory, float, "GB", dest="gpu_gib")
    share = "SGLang's flag: share of the GPU's memory for weights and KV (default: 0.88)"
    add("--mem-fraction-static", share, float, "SHARE", default=0.88, dest="mem_fraction")
    weights = "SGLang's flag: type of the weights (default: auto, the type in config.json, or float16 for float32)"
    add("--dtype", weights, str, None, default="auto", choices=("auto", *DTYPES))
    kv = "SGLang's flag: type of KV (default: auto, the type of the weights)"
    add("--kv-cache-dtype", kv, str, None, default="auto", choices=("auto", *FP8_KV))


def run(args: argparse.Namespace) -> int:
    from sglang_scout.cli.sizes import make_plan  # imports torch, which the help must not

    asked = {name: x for name, x in vars(args).items() if name not in ("run", "json", "gpu")}
    device = find_device(args.gpu) if args.gpu else None
    if device and args.gpu_gib is None:
        asked["gpu_gib"] = device.memory_bytes / GIB
    plan = make_plan(**asked)
    modelled = has_model(plan.server.policy)
    steps = predict(plan, device) if device and plan.fits and modelled else None
    print(json.dumps(as_dict(plan, steps), indent=2) if args.json else as_text(plan, steps))
    if device and not modelled and not args.json:
        what = "the model covers only policies whose CPU attention runs one layer ahead"
        print(f"\nNo step is predicted: {what}.")
    return 0 if plan.fits else 1


def as_dict(plan: Plan, steps: tuple[Prediction, Prediction] | None = None) -> dict[str, Any]:
    """The plan as plain numbers; sizes in bytes, times in us. ``steps``: low and high end."""
    server, memory, config = plan.server, plan.memory, plan.server.config
    on_device = {what for what, _, _ in memory.device_rows}
    result: dict[str, Any] = {
        "model": asdict(server.model),
        "policy": config.policy,
        "digest": config.digest,
        "budget_tokens": config.budget_tokens,
        "context_tokens": server.context_tokens,
        "kv_bytes_per_token": server.kv_bytes_per_token,
        "kv_bytes_per_page": server.kv_bytes_per_page,
        "digest_bytes_per_page": server.digest_bytes_per_page,
        "host_pages_per_request": server.pages_per_request,
        "host_bytes": plan.host_bytes,
        "gpu_bytes_after_weights": plan.gpu_kv_bytes,
        "requests": plan.requests,
        "memory": [
            {"what": what, "count": count, "bytes": nbytes, "on_device": what in on_device}
            for what, count, nbytes in memory.rows
        ],
        "device_bytes": memory.device_bytes,
        "huge_pages": plan.huge_pages,
        "fits": plan.fits,
    }
    result |= {"offload": plan.offload} | ({"stock": plan.stock} if plan.stock else {})
    if steps is not None:
        low, high = (
            end.offload.as_dict()
            | {"wins_from_requests": end.wins_from, "speed_up": end.speed_up}
            | {"wins_with_host_bytes": end.wins_host_bytes}
            for end in steps
        )
        stock = steps[1].stock.as_dict()
        result["step"] = {"note": CAVEAT, "low": low, "high": high, "stock": stock}
    return result


def as_text(plan: Plan, steps: tuple[Prediction, Prediction] | None = None) -> str:
    server, model, config = plan.server, plan.server.model, plan.server.config
    experts = f", of which a token uses {gib(model.bytes_a_token)}" if model.expert_bytes else ""
    page = f"{config.page_size_tokens} tokens: {gib(server.kv_bytes_per_page)} of KV, "
    heads = f"{model.num_q_heads} query and {model.num_kv_heads} KV heads of {model.head_dim}"
    facts = [
        ("model", f"{model.architecture}, {model.num_layers} layers, {heads}"),
        ("weights", f"{gib(model.weight_bytes)} ({model.weight_source}){experts}"),
        ("policy", f"{config.policy}, budget of {config.budget_tokens} tokens"),
        ("KV per token", f"{server.kv_bytes_per_token} bytes, {model.kv_dtype}"),
        ("page", f"{page}{gib(server.digest_bytes_per_page)} of digest, over all layers"),
    ]
    memory, requests = plan.memory, max(plan.requests, 1)
    device = "device" if plan.gpu_kv_bytes is None else "GPU"
    sizes = [("", "", "all", "per request")]
    for row in (*memory.rows, total := ("total", requests, memory.device_bytes)):
        what, count, nbytes = row
        where = device if row in (*memory.device_rows, total) else "host"
        sizes.append((f"{where}: {what}", str(count), gib(nbytes), gb(nbytes / requests)))
    by_host = f"by host memory ({gib(plan.host_bytes)})", str(plan.offload["by_host"]), "-"
    fits = [("", "offload", "stock"), by_host]
    if plan.stock is not None:
        name = f"by GPU memory ({gib(plan.gpu_kv_bytes or 0)} after the weights)"
        fits.append((name, str(plan.offload["by_gpu"]), str(plan.stock["by_gpu"])))
    blocks = [
        columns(facts),
        f"Memory of {_count(requests)} of {server.context_tokens} tokens ({server.pages_per_request} "
        f"pages){' each' * (requests > 1)}\n" + columns(sizes, right=(1, 2, 3), indent=2),
        "Requests that fit at once\n" + columns(fits, right=(1, 2), indent=2),
        _verdict(plan),
    ]
    if steps is not None:
        blocks.insert(3, _step_text(*steps))
    return "\n\n".join(blocks)


def _step_text(low: Prediction, high: Prediction) -> str:
    steps = low.offload, high.offload, high.stock
    gains = [f"{end.speed_up:.1f}" if end.speed_up else "-" for end in (low, high)]
    rows: list[tuple[str, ...]] = [
        ("", "offload, low", "high", "stock"),
        ("requests", *(str(s.batch) for s in steps)),
        ("ms per step", *(f"{s.us / 1e3:.1f}" if s.batch else "-" for s in steps)),
        ("tokens per second", *(f"{s.tokens_per_s:.0f}" if s.batch else "-" for s in steps)),
        ("speed-up over stock", *gains, ""),
        ("longest part", *(s.bound if s.batch else "-" for s in steps)),
    ]
    for name in {**low.offload.parts_us, **low.offload.beside_us}:
        values = ({**s.parts_us, **s.beside_us}.get(name) if s.batch else None for s in steps)
        beside = " (in parallel)" if name in low.offload.beside_us else ""
        shown = ("-" if x is None else f"{x / 1e3:.2f}" for x in values)
        rows.append((f"  {name}{beside}, ms", *shown))
    lines = [f"A decode step, predicted (not measured)\n{columns(rows, right=(1, 2, 3), indent=2)}"]
    for name, end in (("Low", low), ("High", high)):
        what = "no batch that fits is faster than stock"
        if end.wins_from is not None:
            pages = gib(end.wins_host_bytes or 0)
            what = f"faster than stock from {_count(end.wins_from)} on, with {pages} of host pages"
        lines.append(f"{name} end: {what}.")
    return "\n".join([*lines, *textwrap.wrap(CAVEAT, 100)])


def _verdict(plan: Plan) -> str:
    server, memory, requests = plan.server, plan.memory, max(plan.requests, 1)
    binds = plan.offload["limited_by"].replace("gpu", "GPU")
    first = f"{_count(plan.requests)} at once; {binds} is the limit."
    if not plan.requests:
        first = f"No request fits; {binds} is the limit."
    elif plan.asked is not None:
        first = f"{_count(requests)} can run at once; beyond that, {binds} is the limit."
        if not plan.fits:
            first = f"{_count(requests)} cannot run at once: {binds} is too small."
    place = "device memory" if plan.gpu_kv_bytes is None else "GPU memory"
    text = (
        f"{first}\n"
        f"For {_count(requests)}: --max-running-requests {requests} --context-length {server.context_tokens} "
        f"--kv-offload-host-gb {plan.host_gib:.1f},\n"
        f"which takes {gib(memory.device_bytes)} of {place} beside the weights, and up to "
        f"{gib(memory.bytes_beside_pages)} of host memory beside the pages.\n"
        f"To use huge pages, reserve them first: sysctl vm.nr_hugepages={plan.huge_pages}."
    )
    if plan.gpu_kv_bytes is None:
        text += (
            "\nWithout --gpu-gb only host memory is a limit. With --device cpu, device memory is host memory too, in "
            "addition to --kv-offload-host-gb."
        )
    if (most := server.model.max_context_tokens) < server.context_tokens:
        text += f"\nThe model's config.json allows {most} tokens; a longer context needs its RoPE scaling."
    return text


def _count(requests: int) -> str:
    return f"{requests} request" + ("" if requests == 1 else "s")
