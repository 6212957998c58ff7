"""``sglang-scout``: checks and sizes for people who run servers, without sglang or torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from sglang_scout import __version__
from sglang_scout.core.errors import ScoutError

__all__ = ["main"]

_DESCRIPTION = (
    "KV offload for SGLang decode servers. The servers themselves are started with SGLang's own "
    "commands plus --kv-offload; the commands here tell whether a machine can serve, and for how "
    "many requests its memory is enough."
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
        "(default: half of what is available here now, as the server takes)",
    )
    plan.add_argument(
        "--gpu-gb",
        type=float,
        metavar="GB",
        help="memory of one GPU in GiB; without it no GPU is planned for, and digests and "
        "resident pages are counted as host memory",
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
        help="as SGLang's flag: type of weights and KV (default: auto, what config.json says)",
    )
    for sub in (doctor, plan):
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
