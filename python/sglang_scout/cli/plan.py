"""``sglang-scout plan``: how many requests fit, the commands that start such servers, their memory and the predicted
time of a step; text or one JSON object."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglang_scout.cli import GIB, columns, gb, gib
from sglang_scout.cli.step_model import CAVEAT, GPUS, TERMS, find_device, has_model, predict
from sglang_scout.core.config import DEFAULT_BUDGET_TOKENS, KEYS
from sglang_scout.core.flags import DTYPES, FP8_KV, load_json

if TYPE_CHECKING:
    from sglang_scout.cli.sizes import Plan
    from sglang_scout.cli.step_model import Prediction

DESCRIPTION = (
    "Say how many requests fit a decode server, which commands start it, and what takes memory. It reads the model's "
    "config.json and the sizes of its files, and loads no weights. With --gpu it also predicts the time of a decode "
    "step, with stock SGLang and with offload, from bytes and bandwidths. GiB is 2**30 bytes, as in "
    "--kv-offload-host-gb; GB is 10**9. The exit code is 1 if the requests do not fit."
)
MEMORY = {
    "host pages": "KV of all tokens, by pages of 32",
    "digests": "a summary of each host page, by which pages are selected",
    "input buffers": "SGLang's, 48 bytes for each token of the host pages",
    "resident slots": "copies of pages: a budget for each request, and room for those being copied",
    "step buffers": "what the policy selects or fetches in a step",
    "kept tokens": "tokens that each head keeps for CPU attention",
    "salience": "moving averages of attention weights",
    "hints": "the best pages for a prompt's last token, from the prefill server",
    "checksums": "of all full pages",
    "ring": "queries to the CPU attention process and its results",
    "partial results": "of attention threads that share a request",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, text: str, kind: type = int, metavar: str | None = "N", **more: Any) -> None:
        parser.add_argument(*flag.split(), help=text, type=kind, metavar=metavar, **more)

    model = parser.add_mutually_exclusive_group(required=True)
    where = "folder of the model, or its name on the Hugging Face Hub, whose config.json is downloaded if necessary"
    as_path = {"nargs": "?", "default": argparse.SUPPRESS, "metavar": "MODEL"}
    model.add_argument("model_path", help=where, **as_path)
    model.add_argument("--model-path", help="the same, as the server's flag", metavar="MODEL")
    shape = "instead of a model: layers=N,hidden=N,heads=N,kv_heads=N,head_dim=N,parameters=N of a dense one"
    model.add_argument("--shape", help=shape)
    tokens = "tokens of one request, prompt and answer (default: the model's maximum)"
    add("--context --context-tokens", tokens, dest="context_tokens")
    add("--requests", "concurrent requests to plan for (default: as many as fit)")
    add("--kv-offload", "as the server's flag (default: scout)", str, "POLICY", dest="policy")
    add("--kv-offload-config", "as the server's flag", str, "JSON", dest="config")
    budget = "as the server's flag, a multiple of 32 (default: {}, unless the policy has its own)"
    of_flag = {"metavar": "TOKENS", "dest": "budget_tokens"}
    add("--kv-offload-budget --budget", budget.format(DEFAULT_BUDGET_TOKENS), **of_flag)
    host = "the server's --kv-offload-host-gb, in GiB (default: about the server's, half of the available memory)"
    add("--host-gb", host, float, "GB", dest="host_gib")
    gpu = (
        f"GPU to predict step times for, and whose memory is the default of --gpu-gb: {', '.join(GPUS)}, or a file "
        "NAME.json with a device's rates (python/sglang_scout/cli/step_model.py names them)"
    )
    add("--gpu", gpu, str, "NAME")
    memory = "memory of one GPU in GiB (default: that of --gpu; without both, only host memory limits the requests)"
    add("--gpu-gb", memory, float, "GB", dest="gpu_gib")
    share = "SGLang's flag: share of the GPU's memory for weights and KV (default: 0.88)"
    add("--mem-fraction-static", share, float, "SHARE", dest="mem_fraction")
    weights = "SGLang's flag: type of the weights (default: auto, the type in config.json, or float16 for float32)"
    add("--dtype", weights, str, None, choices=("auto", *DTYPES))
    kv = "SGLang's flag: type of KV (default: auto, the type of the weights)"
    add("--kv-cache-dtype", kv, str, None, choices=("auto", *FP8_KV))


def run(args: argparse.Namespace) -> int:
    from sglang_scout.cli.sizes import make_plan  # imports torch, which the help must not

    other = "run", "json", "gpu"
    asked = {k: x for k, x in vars(args).items() if k not in other and x is not None}
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
    note = steps[1].device.note if steps else ""
    blocks = [_answer(plan, note), commands(plan) if plan.fits else "", _memory(plan)]
    if steps is not None:
        blocks.append(_step_text(*steps))
    return "\n\n".join(filter(None, [*blocks, _facts(plan, steps)]))


def _answer(plan: Plan, note: str) -> str:
    asked, most = plan.asked, plan.offload["requests"]
    each = f"{_count(plan.count)} of {plan.server.context_tokens:,} tokens"
    more = f" Up to {most} would." if most > plan.count else ""
    lines = [f"{each} at once.{more}"] if plan.fits else [f"Not {each} at once.", *_shortage(plan)]
    if plan.stock is not None:
        lines[0] += f" Stock SGLang, with KV on the same GPU: {plan.stock['requests']}."
    given = "" if asked.host_gib else ", half of what is free here; for another machine: --host-gb"
    lines += [f"Host memory ({gib(plan.host_bytes)}{given}) holds {plan.offload['by_host']}."]
    if plan.stock is None:
        what = "GPU memory is not counted: add --gpu NAME or --gpu-gb N"
        lines += [f"{what}. Without a GPU both servers share the host's."]
    else:
        left = gib(plan.gpu_kv_bytes or 0)
        lines += [f"GPU memory ({left} beside the weights) holds {plan.offload['by_gpu']}."]
        lines += [f"The limit is {plan.offload['limited_by'].replace('gpu', 'GPU')}."]
    return "What fits\n" + textwrap.indent("\n".join(filter(None, [*lines, note])), "  ")


def _shortage(plan: Plan) -> list[str]:
    """Which memory is short, by how much, and values that fit."""
    host, gpu = plan.host_gib - plan.host_bytes / GIB, plan.gpu_gib - (plan.asked.gpu_gib or 0)
    short, enough = [], []
    if plan.offload["by_host"] < plan.count:
        short.append(f"Host memory for KV is short by {host:.1f} GiB.")
        enough.append(f"--host-gb {plan.host_gib}")
    if plan.stock is not None and plan.offload["by_gpu"] < plan.count:
        weights = gib(plan.server.model.weight_bytes)
        short.append(f"GPU memory is short by {gpu:.1f} GiB (the weights take {weights}).")
        share = plan.gpu_gib * plan.asked.mem_fraction / (plan.asked.gpu_gib or 1)
        more = f"--mem-fraction-static {math.ceil(100 * share) / 100}"
        enough.append(more if share < 0.9 else f"--gpu-gb {plan.gpu_gib}")
    other = {"--requests": plan.offload["requests"], "--context": plan.longest()}
    fixes = [f"{flag} {most}" for flag, most in other.items() if most] + [" with ".join(enough)]
    return [*short, f"What would fit: {', or '.join(fixes)}."]


def commands(plan: Plan) -> str:
    """What starts both servers and the router, for a shell."""
    asked, server = plan.asked, plan.server
    keys, rope = load_json(asked.config), server.model.stretched(server.context_tokens)
    share = asked.mem_fraction if asked.mem_fraction != type(asked).mem_fraction else None
    dtype, kv_dtype = (x.replace("auto", "") for x in (asked.dtype, asked.kv_cache_dtype))

    def launch(port: int, mode: str) -> str:
        decodes, path = mode == "decode", asked.model_path or "MODEL"
        own = {name: x for name, x in keys.items() if decodes or "both servers" in KEYS[name].help}
        lines: list[dict[str, Any]] = [
            {"--model-path": path, "--port": port},
            {"--disaggregation-mode": mode, "--kv-offload": asked.policy},
            {"--context-length": server.context_tokens},
            {"--json-model-override-args": rope and json.dumps(rope)},
        ]
        if decodes:
            lines[0] |= {"--base-gpu-id": int(asked.gpu_gib is not None)}
            lines[1] |= {"--kv-offload-host-gb": plan.host_gib}
            lines[1] |= {"--kv-offload-budget": asked.budget_tokens}
            lines[2] |= {"--max-running-requests": plan.count, "--mem-fraction-static": share}
            if server.config.paper and server.config.recall == "fixed":
                lines[1] |= {"--kv-offload-recall-profile": "PROFILE.json"}
        lines[1] |= {"--kv-offload-config": own and json.dumps(own)}
        lines[2] |= {"--dtype": dtype, "--kv-cache-dtype": kv_dtype}
        words = (
            " ".join(f"{flag} {shlex.quote(str(x))}" for flag, x in line.items() if x)
            for line in lines
        )
        return "python -m sglang.launch_server " + " \\\n    ".join(filter(None, words))

    tokens = 2 * server.context_tokens + 64
    notes = [f"Without a GPU: --device cpu, and for the first --max-total-tokens {tokens}"]
    if asked.gpu_gib is not None:
        notes = ["For two GPUs of one machine; for one see docs/gpu-quickstart.md"]
    if server.config.paper:
        notes += [
            "PROFILE.json: from sglang-scout profile, and a step log of requests without recall"
        ]
    if most := rope and server.model.max_context_tokens:
        notes += [f"Beyond config.json's {most:,} tokens YaRN scales RoPE: the model must allow it"]
    notes += [f"For huge pages, as root, before: sysctl vm.nr_hugepages={plan.huge_pages}"]
    lines = ["What to pass, each command in a shell of its own", *(f"# {note}" for note in notes)]
    lines += [
        launch(30000, "prefill"),
        launch(30001, "decode"),
        "python -m sglang_router.launch_router --pd-disaggregation --host 127.0.0.1 --port 30002 \\\n"
        "    --prefill http://127.0.0.1:30000 8998 --decode http://127.0.0.1:30001",
    ]
    return "\n".join(lines)


def _memory(plan: Plan) -> str:
    memory, count = plan.memory, plan.count
    device = "device" if plan.gpu_kv_bytes is None else "GPU"
    host = sum(nbytes for _, _, nbytes in memory.rows) - memory.device_bytes
    totals = ("total", count, memory.device_bytes), ("total", count, host)
    sizes = [("", "", "all", "per request")]
    for row in (*memory.rows, *totals):
        what, number, nbytes = row
        where = device if row in (*memory.device_rows, totals[0]) else "host"
        sizes.append((f"{where}: {what}", str(number), gib(nbytes), gb(nbytes / count)))
    pages = f"{plan.server.pages_per_request} pages"
    each = f"{_count(count)} of {plan.server.context_tokens:,} tokens ({pages})"
    explained = columns([(what, MEMORY[what]) for what, _, _ in memory.rows], indent=4)
    table = columns(sizes, right=(1, 2, 3), indent=2)
    return f"Memory of {each}{' each' * (count > 1)}\n{table}\n{explained}"


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
    terms = {**low.offload.parts_us, **low.offload.beside_us}
    for name in terms:
        values = ({**s.parts_us, **s.beside_us}.get(name) if s.batch else None for s in steps)
        shown = ("-" if x is None else f"{x / 1e3:.2f}" for x in values)
        rows.append((f"  {name}, ms", *shown))
    lines = [
        f"A decode step, predicted (not measured)\n{columns(rows, right=(1, 2, 3), indent=2)}",
        columns([(name, TERMS[name]) for name in terms], indent=4),
    ]
    for name, end in (("Low", low), ("High", high)):
        what = "no batch that fits is faster than stock"
        if end.wins_from is not None:
            pages = gib(end.wins_host_bytes or 0)
            what = f"faster than stock from {_count(end.wins_from)} on, with {pages} of host pages"
        lines.append(f"{name} end: {what}.")
    return "\n".join([*lines, *textwrap.wrap(CAVEAT, 100)])


def _facts(plan: Plan, steps: tuple[Prediction, Prediction] | None) -> str:
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
    if steps is not None:
        gpu = steps[1].device
        rates = f"{gpu.memory_gb_s:.0f} GB/s, {gpu.flop_s / 1e12:.0f} TFLOP/s of dense bfloat16"
        host = f"memory {gpu.host_gb_s:.0f} GB/s for this server, link {gpu.link_gb_s:.0f} GB/s"
        facts += [("GPU", f"{rates} (published)"), ("host", f"{host} each way (assumed)")]
    return columns(facts)


def _count(requests: int) -> str:
    return f"{requests} request" + ("" if requests == 1 else "s")
