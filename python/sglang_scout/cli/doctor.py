"""``sglang-scout doctor``: can this machine serve? Checks it, and runs a real attention process."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, entry_points, requires, version

from sglang_scout.cli import machine
from sglang_scout.cli.machine_checks import (
    FAILED,
    OK,
    WARNING,
    Check,
    check_cpus,
    check_environment,
    check_gpu,
    check_hugepages,
    check_locked_memory,
    check_memory,
)
from sglang_scout.cli.table import columns
from sglang_scout.core.cpu_list import parse_cpu_list
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.sglang_versions import ADAPTERS

DESCRIPTION = (
    "Check whether this machine can serve. Each line says ok, warning or failed and what was found; a line "
    "that starts with -> says what to do. One check has SGLang run a tiny random model and compares its "
    "queries with predicted ones. Another starts a real CPU attention process and compares what it "
    "computes. The exit code is 1 if a check failed, otherwise 0."
)
PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "scout"
TIMEOUT_S = 120
AGAIN = "do what the lines marked -> say, then run sglang-scout doctor again"
START = (
    "run sglang-scout plan --model-path DIR to see how many requests fit, then start both servers of a pair with "
    "--kv-offload scout (docs/tutorial.md)"
)
INSTALL = "in a clone, run scripts/setup.sh, or pip install '.[cpu]' or '.[cuda]' into your own environment"


def pinned(distribution: str) -> str | None:
    """Version of a distribution that this one requires; None if it requires none."""
    for requirement in requires("sglang-scout") or ():
        name, equal, wanted = requirement.partition("==")
        if equal and name.strip() == distribution:
            return wanted.partition(";")[0].strip()  # what follows is its extra
    return None


def check_python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    values = {"version": found, "executable": sys.executable}
    if sys.version_info >= (3, 13):
        fix = "use Python 3.11 or 3.12: not all of SGLang's packages have wheels for newer versions"
        return Check("python", WARNING, found, fix, values)
    return Check("python", OK, found, values=values)


def check_sglang() -> Check:
    supported = list(ADAPTERS)
    fix = (
        f"pip install sglang=={supported[0]}; sglang-scout supports only {' and '.join(supported)}"
    )
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return Check("sglang", FAILED, "not installed", fix)
    values = {"version": found, "supported": supported}
    if found not in supported:
        return Check("sglang", FAILED, f"{found}, expected {' or '.join(supported)}", fix, values)
    done = _python("-c", "import torch, sgl_kernel")
    if "libcuda.so.1" in done.stderr and found != "0.5.15.post1":  # which works without them
        fix = "without a GPU: run scripts/no_driver.sh VENV, then . scripts/cpu_env.sh; with a GPU: install its driver"
        return Check(
            "sglang", FAILED, f"{found}; its kernels do not load: {_reason(done)}", fix, values
        )
    return Check("sglang", OK, found, values=values)


def check_queries() -> Check:
    """Whether SGLang's layers get the inputs that queries are predicted from. On the CPU, even if there is a GPU."""
    on_cpu = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = _python("-m", "sglang_scout.plugin.query_check", **on_cpu)
    if done.returncode != 0:
        fix = (
            "see the sglang check above; a decode server repeats this comparison in its first steps"
        )
        return Check(
            "queries", WARNING, f"could not compare predicted queries: {_reason(done)}", fix
        )
    found = json.loads(done.stdout.splitlines()[-1])
    if "error" in found:
        return Check("queries", FAILED, found["error"], "please report it")
    return Check("queries", OK, "predicted queries match those that SGLang's layers compute")


def check_plugin() -> Check:
    found = {e.name: e.value for e in entry_points(group=PLUGIN_GROUP)}
    if PLUGIN_NAME not in found:
        return Check("plugin", FAILED, f"no entry point {PLUGIN_NAME!r} in {PLUGIN_GROUP}", INSTALL)
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    values = {"entry_point": found[PLUGIN_NAME], "allowed": names}
    if names and PLUGIN_NAME not in names:
        fix = f"add {PLUGIN_NAME} to SGLANG_PLUGINS, or unset it"
        return Check(
            "plugin",
            FAILED,
            f"SGLANG_PLUGINS={allowed} does not include {PLUGIN_NAME}",
            fix,
            values,
        )
    return Check("plugin", OK, found[PLUGIN_NAME], values=values)


def check_native() -> Check:
    done = _python("-c", "from sglang_scout import _native; print(_native.isa())")
    if done.returncode != 0:
        return Check("native module", FAILED, f"cannot be imported: {_reason(done)}", INSTALL)
    isa, forced = done.stdout.strip(), os.environ.get("SCOUT_ISA")
    values = {"isa": isa, "forced": forced}
    if forced:
        fix = "unset SCOUT_ISA to use the best instruction set of this CPU"
        return Check("native module", WARNING, f"{isa}, SCOUT_ISA={forced} is set", fix, values)
    return Check("native module", OK, isa, values=values)


def _python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a subprocess: its imports may crash, print or start threads."""
    command, env = [sys.executable, *words], {**os.environ, **variables}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {TIMEOUT_S} s")


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _importable(name: str, module: str, distribution: str, packages: str = "") -> Check:
    """Whether ``module`` imports; ``packages``: Debian packages of its shared libraries."""
    done = _python("-c", f"import {module}")
    found = wanted = None
    with contextlib.suppress(PackageNotFoundError):
        found, wanted = version(distribution), pinned(distribution)
    values = {"distribution": distribution, "version": found, "wanted": wanted}
    if done.returncode != 0:
        reason = _reason(done)
        fix = f"pip install {distribution}"
        if "cannot open shared object file" in reason and packages:
            fix = f"apt-get install -y {packages}"
        return Check(name, FAILED, reason, fix, values)
    if wanted is not None and found != wanted:
        fix = f"tested with {wanted}: pip install {distribution}=={wanted}"
        return Check(name, WARNING, f"{found}, expected {wanted}", fix, values)
    return Check(name, OK, found or "found (another distribution)", values=values)


def check_mooncake() -> Check:
    name, packages = "mooncake", "libibverbs1 librdmacm1"
    if not machine.nvidia_gpus():
        distribution = "mooncake-transfer-engine-non-cuda"
        return _importable(name, "mooncake.engine", distribution, packages)
    # The CUDA build finds libcudart as in a server, which imports torch first.
    distribution = "mooncake-transfer-engine-cuda13"
    packages += " ibverbs-providers libcurl4"
    check = _importable(name, "torch, mooncake.engine", distribution, packages)
    if check.state == OK and not machine.transfer_reads_device():
        found = f"{check.found}; built without CUDA, so TCP cannot send from a GPU"
        fix = f"pip install {distribution}=={pinned(distribution)}, or start the prefill server with --device cpu"
        return replace(check, state=WARNING, found=found, fix=fix)
    return check


def check_router() -> Check:
    return _importable("router", "sglang_router", "sglang-router")


def check_worker(cpus: list[int]) -> Check:
    from sglang_scout.cli.worker_check import compare_and_time

    try:
        result = compare_and_time(cpus)
    except ConfigError as error:
        what, _, fix = str(error).rpartition("; ")
        return Check("CPU attention", FAILED, what, fix)
    except Exception as error:  # any failure is a result of the check
        fix = "fix the error above; in a checkout, scripts/setup.sh --force rebuilds the native module"
        return Check("CPU attention", FAILED, f"{type(error).__name__}: {error}", fix)
    text = (
        f"ready in {result.ready_s * 1e3:.0f} ms, control socket {result.endpoint}; "
        f"{result.rows} sequences x {result.pages} pages: largest error {result.max_error:.1e}, "
        f"round trip {result.batch_us:.0f} us; one page: {result.page_us:.0f} us"
    )
    if not result.right:
        found = f"{text}: {result.problem}"
        return Check("CPU attention", FAILED, found, "please report it", asdict(result))
    return Check("CPU attention", OK, text, values=asdict(result))


def check_policy(name: str, keys: str) -> Check:
    """The policy's own requirements."""
    done = _python("-m", "sglang_scout.cli.policy_check", name, keys)
    if done.returncode != 0:
        return Check("policy", FAILED, _reason(done), INSTALL)
    found = json.loads(done.stdout)
    if "error" in found:
        what, _, fix = found["error"].rpartition("; ")
        return Check("policy", FAILED, what, fix)
    files = "".join(f"; {file}" for file in found["files"])
    text = f"{name}: {found['missing']}; budget of {found['budget_tokens']} tokens{files}"
    return Check("policy", OK, text, values=found)


def checks(given: list[int] | None) -> list[Callable[[], Check]]:
    """All checks, in the order of the report."""
    return [
        check_python, check_sglang, check_plugin, check_native, lambda: check_cpus(given), check_gpu,
        check_environment, check_memory, check_hugepages, check_locked_memory, check_mooncake,
        check_router, check_queries, lambda: check_worker(given or sorted(os.sched_getaffinity(0))),
    ]  # fmt: skip


def report(results: list[Check]) -> str:
    """The text report; each fix is below its line."""
    lines = columns([(check.state, check.name, check.found) for check in results]).splitlines()
    gap = " " * (max(len(check.state) for check in results) + 2)
    out = []
    for check, line in zip(results, lines, strict=True):
        out.append(line)
        out += [f"{gap}{more}" for more in check.below.splitlines()]
        if check.fix:
            out.append(f"{gap}-> {check.fix}")
    failed = sum(check.state == FAILED for check in results)
    warned = sum(check.state == WARNING for check in results)
    verdict = (
        "this machine can serve" if not failed else f"{failed} failed: this machine cannot serve"
    )
    out.append(f"\n{verdict}" + (f"; warnings: {warned}" if warned else ""))
    out.append(f"next: {AGAIN if failed else START}")
    return "\n".join(out)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpus",
        metavar="LIST",
        help="CPUs for CPU attention, as for --kv-offload-cpus, for example 0-35 (default: those that a decode "
        "server would take; the check of CPU attention takes every CPU of this process)",
    )
    parser.add_argument(
        "--kv-offload",
        metavar="POLICY",
        help="also check what this policy needs, as the server's flag would",
    )
    parser.add_argument(
        "--kv-offload-config", metavar="JSON", default="{}", help="the same as the server's flag"
    )


def run(args: argparse.Namespace) -> int:
    """Runs all checks, prints them, returns the exit code.

    Raises:
        ConfigError: ``args.cpus`` is not a list of CPUs of this process.
    """
    given = None if args.cpus is None else list(parse_cpu_list(args.cpus, flag="--cpus"))
    results = [check() for check in checks(given)]
    if args.kv_offload is not None:
        results.append(check_policy(args.kv_offload, args.kv_offload_config))
    ok = all(check.state != FAILED for check in results)
    if args.json:
        found = [{k: v for k, v in asdict(check).items() if k != "below"} for check in results]
        print(json.dumps({"ok": ok, "checks": found}, indent=2))
    else:
        print(report(results))
    return 0 if ok else 1
