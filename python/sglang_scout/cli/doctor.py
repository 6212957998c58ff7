"""``sglang-scout doctor``: can this machine serve? Checks it, and runs a real attention process."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path

from sglang_scout.cli import checks as machine
from sglang_scout.cli import columns
from sglang_scout.cli.checks import FAILED, WARNING, Check, python, reason
from sglang_scout.core import numa
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import ADAPTERS, UNTESTED_OVERRIDE
from sglang_scout.core.numa import parse_cpu_list

DESCRIPTION = (
    "Check whether this machine can serve. Each line says ok, warning or failed and what was found; a line that starts "
    "with -> says what to do. One check starts a real CPU attention process. The exit code is 1 if a check failed, "
    "otherwise 0."
)
PLUGIN_GROUP, PLUGIN_NAME = "sglang.srt.plugins", "scout"
AGAIN = "do what the lines marked -> say, then run sglang-scout doctor again"
START = (
    "run sglang-scout plan MODEL to see how many requests fit, then start both servers of a pair with "
    "--kv-offload scout (docs/tutorial.md)"
)
INSTALL = "pip install --force-reinstall --no-deps sglang-scout; in a clone, run scripts/setup.sh"
KERNELS = "from sglang_scout.core.no_driver import stand_in_for_the_driver as start; start(); import sgl_kernel"


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def pinned(distribution: str) -> str | None:
    """Version of a distribution that this one requires; None if it requires none."""
    for requirement in requires("sglang-scout") or ():
        name, equal, wanted = requirement.partition("==")
        if equal and name.strip() == distribution:
            return wanted.partition(";")[0].strip()  # what follows is its extra
    return None


def check_python() -> Check:
    found = platform.python_version()
    fix = "use Python 3.11 or 3.12: not all of SGLang's packages have wheels for newer versions"
    values = {"version": found, "executable": sys.executable}
    return Check(found, fix if sys.version_info >= (3, 13) else "", values)


def check_sglang() -> Check:
    supported, found = list(ADAPTERS), installed("sglang")
    values = {"version": found, "supported": supported}
    if found not in supported:
        text = f"{found}, expected {' or '.join(supported)}" if found else "not installed"
        fix = f"pip install sglang=={supported[0]}; supported are only {' and '.join(supported)}"
        is_tried = found and os.environ.get(UNTESTED_OVERRIDE) == "1"
        return Check(text, fix, values, failed=not is_tried)
    done = python("-c", KERNELS)
    if done.returncode and found != "0.5.15.post1":  # which works without them
        fix = f"pip install --force-reinstall sglang=={found}, which brings its kernels"
        if "no_driver" in done.stderr:
            fix = INSTALL
        elif "libcuda.so.1" in done.stderr:
            fix = f"the driver lacks its library: {machine.GIVE_DRIVER}"
        return Check(f"{found}; its kernels do not load: {reason(done)}", fix, values, failed=True)
    return Check(found, values=values)


def check_plugin() -> Check:
    found = {e.name: e.value for e in entry_points(group=PLUGIN_GROUP)}
    if PLUGIN_NAME not in found:
        return Check(f"no entry point {PLUGIN_NAME!r} in {PLUGIN_GROUP}", INSTALL, failed=True)
    allowed, text, fix = os.environ.get("SGLANG_PLUGINS", ""), found[PLUGIN_NAME], ""
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    if names and PLUGIN_NAME not in names:
        text = f"SGLANG_PLUGINS={allowed} does not include {PLUGIN_NAME}"
        fix = f"add {PLUGIN_NAME} to SGLANG_PLUGINS, or unset it"
    values = {"entry_point": found[PLUGIN_NAME], "allowed": names}
    return Check(text, fix, values, failed=bool(fix))


def check_native() -> Check:
    done = python("-c", "from sglang_scout import _native; print(_native.isa())")
    if done.returncode != 0:
        return Check(f"cannot be imported: {reason(done)}", INSTALL, failed=True)
    isa, forced = done.stdout.strip(), os.environ.get("SCOUT_ISA")
    text = f"{isa}, SCOUT_ISA={forced} is set" if forced else isa
    fix = "unset SCOUT_ISA to use the best instruction set of this CPU" if forced else ""
    return Check(text, fix, {"isa": isa, "forced": forced})


def _importable(module: str, distribution: str, packages: str = "") -> Check:
    """Whether ``module`` imports; ``packages``: Debian packages of its shared libraries."""
    done, found = python("-c", f"import {module}"), installed(distribution)
    wanted = pinned(distribution)
    text, fix, failed = found or "found (another distribution)", "", done.returncode != 0
    if failed:
        text, fix = reason(done), f"pip install {distribution}" + (f"=={wanted}" if wanted else "")
        if "cannot open shared object file" in text and packages:
            fix = f"apt-get install -y {packages}"
    elif found and found != wanted is not None:
        text = f"{found}, expected {wanted}"
        fix = f"tested with {wanted}: pip install {distribution}=={wanted}"
    values = {"distribution": distribution, "version": found, "wanted": wanted}
    return Check(text, fix, values, failed)


def transfer_reads_device() -> bool:
    """Whether the installed mooncake was built with CUDA. Otherwise every transfer of device memory over TCP fails."""
    spec = importlib.util.find_spec("mooncake")  # a lookup without an import
    folders = (spec.submodule_search_locations or ()) if spec else ()
    modules = (module for folder in folders for module in Path(folder).glob("engine*.so"))
    return any(b"cudaMemcpy" in module.read_bytes() for module in modules)


def check_mooncake() -> Check:
    packages = "libibverbs1 librdmacm1"
    if not numa.nvidia_gpus():
        return _importable("mooncake.engine", "mooncake-transfer-engine-non-cuda", packages)
    # The CUDA build finds libcudart as in a server, which imports torch first.
    distribution = "mooncake-transfer-engine-cuda13"
    packages += " ibverbs-providers libcurl4"
    check = _importable("torch, mooncake.engine", distribution, packages)
    if not check.fix and not transfer_reads_device():
        found = f"{check.found}; built without CUDA, so TCP cannot send from a GPU"
        fix = f"pip install {distribution}=={pinned(distribution)}, or start the prefill server with --device cpu"
        return replace(check, found=found, fix=fix)
    return check


def check_router() -> Check:
    check = _importable("sglang_router", "sglang-router")
    if check.failed:
        fix = "only where the router runs: pip install 'sglang-scout[router]'"
        return replace(check, fix=fix, failed=False)
    return check


def check_policy(name: str, keys: str) -> Check:
    """What a policy needs with these keys of ``--kv-offload-config``."""
    from sglang_scout.cli.sizes import server_config  # imports torch
    from sglang_scout.policy import Context, make_policy

    config, files = server_config(name, keys), []
    layers = max(config.exact_layers, default=0) + 1
    policy = make_policy(Context(config, num_layers=layers, page_bytes=1))
    if weights := policy.rule.weights:
        about = weights.header
        files.append(f"{about.kind}_file {weights.path}, of {about.identity.describe()}")
    missing = policy.describe_missing()
    text = f"{name}: {missing}; budget of {config.budget_tokens} tokens"
    values = {"policy": policy.name, "budget_tokens": config.budget_tokens, "digest": config.digest}
    values |= {"worker": policy.route == "cpu", "missing": missing, "files": files}
    return Check("; ".join([text, *files]), values=values)


def checks(args: argparse.Namespace) -> Mapping[str, Callable[[], Check]]:
    """All checks by name, in the order of the report. Raises ConfigError if ``args.cpus`` is not a list of CPUs."""
    given = None if args.cpus is None else list(parse_cpu_list(args.cpus, flag="--cpus"))
    found: dict[str, Callable[[], Check]] = {
        "python": check_python,
        "sglang": check_sglang,
        "plugin": check_plugin,
        "native module": check_native,
        "cpus": lambda: machine.check_cpus(given),
        "gpu": machine.check_gpu,
        "environment": machine.check_environment,
        "memory": machine.check_memory,
        "huge pages": machine.check_hugepages,
        "locked memory": machine.check_locked_memory,
        "mooncake": check_mooncake,
        "router": check_router,
        "CPU attention": lambda: machine.check_worker(given),
    }
    if args.kv_offload is not None:
        found["policy"] = lambda: check_policy(args.kv_offload, args.kv_offload_config)
    return found


def outcome(check: Callable[[], Check]) -> Check:
    """What a check finds or raises; a ConfigError ends with its fix."""
    try:
        return check()
    except ConfigError as error:
        what, _, fix = str(error).rpartition("; ")
        return Check(what, fix, failed=True)
    except ImportError as error:
        return Check(str(error), INSTALL, failed=True)
    except Exception as error:
        fix = "fix the error above; in a checkout, scripts/setup.sh --force rebuilds the native module"
        return Check(f"{type(error).__name__}: {error}", fix, failed=True)


def report(results: Mapping[str, Check]) -> str:
    states = [check.state for check in results.values()]
    lines = columns([(check.state, name, check.found) for name, check in results.items()])
    gap, out = " " * (max(map(len, states)) + 2), []
    for check, line in zip(results.values(), lines.splitlines(), strict=True):
        out += [line, *(f"{gap}{more}" for more in check.below.splitlines())]
        if check.fix:
            out.append(f"{gap}-> {check.fix}")
    failed, warned = states.count(FAILED), states.count(WARNING)
    verdict = f"{failed} failed: this machine cannot serve" if failed else "this machine can serve"
    out.append(f"\n{verdict}" + (f"; warnings: {warned}" if warned else ""))
    out.append(f"next: {AGAIN if failed else START}")
    return "\n".join(out)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    cpus = (
        "CPUs for CPU attention, as for --kv-offload-cpus, for example 0-35 (default: those that a decode server would "
        "take; the check of CPU attention takes every CPU of this process)"
    )
    add("--cpus", metavar="LIST", help=cpus)
    add("--kv-offload", metavar="POLICY", help="also check what this policy needs")
    add("--kv-offload-config", metavar="JSON", default="{}", help="the same as the server's flag")


def run(args: argparse.Namespace) -> int:
    results = {name: outcome(check) for name, check in checks(args).items()}
    ok = not any(check.failed for check in results.values())
    found = [
        {"name": name, "state": x.state, "found": x.found, "fix": x.fix, "values": x.values}
        for name, x in results.items()
    ]
    print(json.dumps({"ok": ok, "checks": found}, indent=2) if args.json else report(results))
    return 0 if ok else 1
