"""The installed release of SGLang, the flags added to it, and the hooks into it: declared on their functions, applied
and verified in the processes of their role.

Scheduler processes import this module, for ``ServerArgs``, before SGLang loads plugins.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_scout.core.config import DEFAULT_BUDGET_TOKENS, KEYS, PAPER_BUDGET_TOKENS
from sglang_scout.core.flags import ADAPTERS, check_version
from sglang_scout.policy import policies

VERSION = version("sglang")
RELEASE = check_version(VERSION)
"""The supported release as which the installed one is treated."""
adapter: Any = import_module(f"sglang_scout.plugin.{ADAPTERS[RELEASE]}")
"""What differs between the supported releases: one module each, with the same names."""

_OTHER_BUDGETS = "".join(
    f"; {keys['budget_tokens']} with `{name}`"
    for name, keys in policies().items()
    if "budget_tokens" in keys
)

# The help ends with the default, as scripts/reference.py puts it into a column of its own.
_HELP = {
    "kv_offload": "Turns on GPU-CPU co-attention decoding. KV pages live in host memory, the GPU keeps a digest of "
    "every page and a cache of important pages, and a CPU attention process computes attention to selected pages that "
    "are missing there. Set it on both servers of a prefill-decode pair. Serve with `scout`; the other policies "
    "reproduce other systems for comparison, and `none` is stock SGLang. Policies: none, "
    f"{', '.join(policies())}. Default: none.",
    "kv_offload_budget": "Tokens that a request attends to per layer and decode step, in full pages; a multiple of "
    "32. A request whose context fits the budget gets exact attention while the device's cache holds its pages, a "
    "longer one an approximation. A larger budget is closer to full attention and takes more GPU memory, CPU time and "
    "copies. "
    f"Default: {DEFAULT_BUDGET_TOKENS}{_OTHER_BUDGETS}; {PAPER_BUDGET_TOKENS} with the key `paper`.",
    "kv_offload_host_gb": "Host memory for KV pages in GiB, over all ranks; it limits how many tokens the decode "
    "server can hold. Set it to what `sglang-scout plan` prints, because the default depends on what else is running "
    "at the start. `--max-total-tokens` can only lower it. Default: half of the host memory that is available at the "
    "start, from the NUMA nodes of the attention threads; on a CUDA device at most the pages whose digests fit on the "
    "GPU beside the resident pages.",
    "kv_offload_recall_profile": "JSON file with a recall interval for each layer, made by `sglang-scout profile` "
    "from a step log of your workload. With the key `recall: fixed` layers recall at these, with `recall: adaptive` "
    "they are the first estimates. Default: no file.",
    "kv_offload_cpus": "CPUs for the attention threads, one thread each, for example 0-35 or 0,2,4. They are taken "
    "exactly as given, so leave some for the server. If all belong to one NUMA node, KV pages are allocated on it. "
    "With `--tp-size` they are divided among the ranks. `sglang-scout doctor` prints the default for a machine. "
    "Default: most cores of the GPU's NUMA node, one thread each, the rest being left to the server; on the CPU "
    "device every CPU of the process.",
    "kv_offload_config": "Further settings as a JSON object, or @FILE. docs/reference/configuration.md describes the "
    "keys: "
    f"{', '.join(name for name, key in KEYS.items() if key.is_public)}. Default: no further settings.",
}
_TYPES = {"kv_offload": str, "kv_offload_budget": int | None, "kv_offload_host_gb": float | None}
FIELDS: dict[str, tuple[Any, str | None, str]] = {
    name: (_TYPES.get(name, str | None), "none" if name == "kv_offload" else None, text)
    for name, text in _HELP.items()
}
"""The server flags as fields of SGLang's ``ServerArgs``: type, default, help."""
ServerArgs = adapter.with_fields(FIELDS, __name__)
"""SGLang's, with these fields."""

ROLES = {
    "flags": ("launch",),
    "http": ("http", "halves"),
    "decode": ("decode", "ranks", "requests", "status"),
    "prefill": ("prefill", "ranks", "requests"),
}
"""The modules of each role's hooks. A process applies only those of its own."""

_INSTALL = f"install sglang=={RELEASE} unmodified, and no other plugin"


class Hook(NamedTuple):
    """A function of SGLang, and the one before, after, around or instead of it. What mends a release is dropped with
    the last that needs it."""

    # Below sglang.srt; by release if it differs or is hooked in some only.
    target: str | dict[str, str]
    kind: str  # of SGLang's HookType
    function: Callable[..., Any]
    roles: tuple[str, ...]
    why: str  # as in docs/reference/hooks.md

    @property
    def target_here(self) -> str | None:
        """In the installed release; None: not hooked there."""
        return self.target.get(RELEASE) if isinstance(self.target, dict) else self.target


_declared: list[Hook] = []


def hook(
    target: str | dict[str, str], kind: str, *, roles: str = "", why: str = ""
) -> Callable[[Any], Any]:
    """Declare a function or class to be a :class:`Hook`: for all ``roles`` of its module, because of the first
    paragraph of its docstring, unless these are given."""

    def declare(function: Any) -> Any:
        module = function.__module__.rpartition(".")[2]
        names = roles.split() or [role for role, modules in ROLES.items() if module in modules]
        reason = why or inspect.getdoc(function).partition("\n\n")[0].replace("\n", " ")
        _declared.append(Hook(target, kind, function, tuple(names), reason))
        return function

    return declare


def pools_target(name: str) -> dict[str, str]:
    """The hook's target: a method of the class that builds the pools, by release."""
    old = "model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin"
    new = "mem_cache.kv_cache_configurator.KVCacheConfigurator"
    return {"0.5.15.post1": f"{old}.{name}", "0.5.23": f"{new}.{name}"}


def hooks_of(role: str) -> list[Hook]:
    for module in ROLES[role]:
        import_module(f"sglang_scout.plugin.{module}")
    return [hook for hook in _declared if role in hook.roles]


def apply(hooks: Iterable[Hook]) -> None:
    """Resolve, register, apply and verify. SGLang only logs failures; raises RuntimeError if a target is missing or was
    not patched."""
    targets = set()
    for hook in (one for one in hooks if one.target_here):
        target = f"sglang.srt.{hook.target_here}"
        try:
            pkgutil.resolve_name(target)
        except Exception as error:
            absent = f"hook target {target} is not in this SGLang: {error}"
            raise RuntimeError(f"{absent}; {_INSTALL}") from error
        HookRegistry.register(target, hook.function, HookType(hook.kind))
        targets.add(target)
    HookRegistry.apply_hooks()
    if absent := sorted(targets - HookRegistry._patched):
        raise RuntimeError(f"hooks that were not applied: {', '.join(absent)}; {_INSTALL}")
