"""``sglang-scout``: checks, sizes, intervals and timings for people who run servers, without sglang or torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sglang_scout import __version__
from sglang_scout.core.errors import ScoutError

__all__ = ["main"]

_DESCRIPTION = (
    "KV offload for SGLang decode servers. The servers themselves are started with SGLang's own "
    "commands plus --kv-offload; the commands here tell whether a machine can serve (doctor), how "
    "many requests fit its memory (plan), how often each layer should recall (profile), and where "
    "the time of a decode step goes (report)."
)

_DOCTOR = (
    "Check that this machine can serve. Each line says ok, warning or failed, what was found, and "
    "what to do. The last check starts a real attention worker, has it compute a few pages and "
    "compares the result. The exit code is 1 if a check failed, otherwise 0."
)

_PLAN = (
    "Say how much memory a model's KV pages take and how many requests fit, from the model's "
    "config.json and the sizes of its files; nothing is loaded. GiB counts 2**30 bytes, as "
    "--kv-offload-host-gb does, and GB 10**9. The exit code is 1 if the requests do not fit."
)

_REPORT = (
    "Break a decode step down from a timeline, which a decode server writes with "
    '--kv-offload-config \'{"trace": "FILE"}\': attention, the rest of the layers, prediction, '
    "waiting, the CPU worker, copies, and how long before need each layer's answer was ready. "
    "The file opens in Perfetto too (ui.perfetto.dev)."
)

_PROFILE = (
    "Find out how often each layer should recall. Starts a prefill and a decode server, decodes a "
    "workload without recall, follows how the share of pages that the CPU computes grows in each "
    "layer, and takes for each layer the longest interval that keeps it at the threshold. Then "
    "runs the workload again with these intervals, to see what they give. Decode servers load the "
    "file with --kv-offload-recall-profile. Takes minutes; Ctrl-C stops everything."
)


def _doctor(args: argparse.Namespace) -> int:
    # Imported when asked for: the help must not wait for numpy and the native module.
    from sglang_scout.cli import doctor

    return doctor.run(cpus=args.cpus, as_json=args.json)


def _plan(args: argparse.Namespace) -> int:
    from sglang_scout.cli import plan, plan_report

    request = plan.Request(
        model_path=args.model_path,
        context_tokens=args.context_tokens,
        requests=args.requests,
        budget_tokens=args.budget,
        host_gib=args.host_gb,
        gpu_gib=args.gpu_gb,
        mem_fraction=args.mem_fraction_static,
        dtype=args.dtype,
    )
    return plan_report.run(request, as_json=args.json)


def _report(args: argparse.Namespace) -> int:
    from sglang_scout.cli import report

    return report.run(args.trace, as_json=args.json, plot=args.plot)


def _config(text: str) -> dict[str, Any]:
    from sglang_scout.core.errors import ConfigError
    from sglang_scout.core.parse_config import load_json

    try:
        return load_json(text, "--config")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _profile(args: argparse.Namespace) -> int:
    from sglang_scout.cli import profile
    from sglang_scout.cli.profile_request import Request

    request = Request(
        model_path=args.model_path,
        output=args.output,
        budget_tokens=args.budget,
        threshold=args.threshold,
        steps=args.steps,
        batch=args.batch,
        input_tokens=args.input_len,
        resident_tokens=args.resident_tokens,
        dataset=args.dataset,
        plot=args.plot,
        check=args.check,
        device=args.device,
        dtype=args.dtype,
        server_args=args.server_args,
        config=args.config,
    )
    return profile.run(request, as_json=args.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-scout", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"sglang-scout {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], summary: str, description: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=description)
        sub.set_defaults(run=run)
        return sub

    doctor = command("doctor", _doctor, "check that this machine can serve", _DOCTOR)
    doctor.add_argument(
        "--cpus",
        metavar="LIST",
        help="CPUs of the worker in the last check, as in --kv-offload-cpus, for example 0-35 "
        "(default: every CPU of this process)",
    )

    plan = command("plan", _plan, "memory per request, and how many requests fit", _PLAN)
    plan.add_argument("--model-path", required=True, metavar="DIR", help="folder of the model")
    plan.add_argument(
        "--context-tokens",
        type=int,
        metavar="N",
        help="tokens of one request, prompt and answer (default: what the model allows)",
    )
    plan.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="requests at the same time, to see what they need (default: as many as fit)",
    )
    plan.add_argument(
        "--budget",
        type=int,
        metavar="TOKENS",
        help="as --kv-offload-budget, a multiple of 32 (default: 2048)",
    )
    plan.add_argument(
        "--host-gb",
        type=float,
        metavar="GB",
        help="as --kv-offload-host-gb: host memory for KV pages in GiB "
        "(default: half of what is available here now, about what the server takes)",
    )
    plan.add_argument(
        "--gpu-gb",
        type=float,
        metavar="GB",
        help="memory of one GPU in GiB; without it only --host-gb limits, and what digests and resident "
        "pages take beside it is printed",
    )
    plan.add_argument(
        "--mem-fraction-static",
        type=float,
        default=0.88,
        metavar="SHARE",
        help="as SGLang's flag: share of the GPU for weights and KV (default: 0.88)",
    )
    plan.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="as SGLang's flag: type of weights and KV (default: auto, what config.json says, and float16 for float32)",
    )
    report = command("report", _report, "where the time of a decode step goes", _REPORT)
    report.add_argument("trace", metavar="TRACE", help="the file that the server wrote")
    report.add_argument("--plot", metavar="FILE", help="also draw it, to FILE.png, .svg or .pdf")
    profile = command("profile", _profile, "recall intervals from real decoding", _PROFILE)
    add = profile.add_argument
    add("--model-path", required=True, metavar="DIR", help="folder of the model")
    add("--output", required=True, metavar="FILE", help="the profile to write, JSON")
    add(
        "--dataset",
        metavar="FILE",
        help="text file, or .jsonl with prompt, text or input_ids in each line (default: the "
        "sources of Python's standard library)",
    )
    add(
        "--budget",
        type=int,
        default=2048,
        metavar="TOKENS",
        help="as --kv-offload-budget, a multiple of 32 (default: 2048)",
    )
    add(
        "--threshold",
        type=float,
        default=0.12,
        metavar="RATIO",
        help="share of the budget that the CPU may compute (default: 0.12)",
    )
    add("--steps", type=int, default=256, metavar="N", help="decode steps (default: 256)")
    add("--batch", type=int, default=8, metavar="N", help="requests at once (default: 8)")
    add(
        "--input-len",
        type=int,
        default=8192,
        metavar="TOKENS",
        help="of each prompt, more than the budget (default: 8192)",
    )
    add(
        "--resident-tokens",
        type=int,
        metavar="TOKENS",
        help="as resident_tokens of --kv-offload-config (default: the budget for each request)",
    )
    add("--plot", metavar="FILE", help="also draw it, to FILE.png, .svg or .pdf")
    add(
        "--no-check",
        dest="check",
        action="store_false",
        help="do not run the workload again with the intervals",
    )
    add(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="of the servers (default: auto, a GPU if there is one that can be used)",
    )
    add(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="as SGLang's flag (default: auto)",
    )
    add(
        "--config",
        type=_config,
        default={},
        metavar="JSON",
        help="further keys of the decode server's --kv-offload-config, an object or @FILE",
    )
    add(
        "--server-args",
        default="",
        metavar="TEXT",
        help="more flags for both servers, as one word: --server-args='--trust-remote-code'",
    )
    for sub in (doctor, plan, report, profile):
        sub.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns its exit code: 0 fine, 1 a check failed or something does not fit,
    2 a wrong argument."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except ScoutError as error:
        print(f"sglang-scout: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, head for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
