"""The installed release of SGLang, and the hooks into it: declared on their functions, applied and verified in the
processes of their role."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_scout.core.flags import ADAPTERS, check_version

VERSION = version("sglang")
check_version(VERSION)
adapter: Any = import_module(f"sglang_scout.plugin.{ADAPTERS[VERSION]}")
"""What differs between the supported releases: one module each, with the same names."""

ROLES = {
    "flags": ("launch",),
    "http": ("http", "halves"),
    "decode": ("decode", "requests", "transfers"),
    "prefill": ("prefill", "requests", "transfers"),
}
"""The modules of each role's hooks. A process applies only those of its own."""

_INSTALL = f"install sglang=={VERSION} unmodified, and no other plugin"


class Hook(NamedTuple):
    """A function of SGLang, and the one before, after, around or instead of it.

    Attributes:
        target: dotted name below ``sglang.srt``; by release if it differs or is hooked in some only. What mends a
            release is dropped with the last that needs it.
        kind: as of SGLang's ``HookType``.
        why: as it stands in docs/reference/hooks.md too.
        package: that the target's module imports and SGLang runs without; where it is absent nothing is hooked.
    """

    target: str | dict[str, str]
    kind: str
    function: Callable[..., Any]
    roles: tuple[str, ...]
    why: str
    package: str

    @property
    def target_here(self) -> str | None:
        """In the installed release; None: not hooked there."""
        return self.target.get(VERSION) if isinstance(self.target, dict) else self.target


_declared: list[Hook] = []


def hook(
    target: str | dict[str, str], kind: str, *, roles: str = "", why: str = "", package: str = ""
) -> Callable[[Any], Any]:
    """Declare a function or class to be a :class:`Hook`: for all ``roles`` of its module, because of the first
    paragraph of its docstring, unless these are given."""

    def declare(function: Any) -> Any:
        module = function.__module__.rpartition(".")[2]
        names = roles.split() or [role for role, modules in ROLES.items() if module in modules]
        reason = why or inspect.getdoc(function).partition("\n\n")[0].replace("\n", " ")
        _declared.append(Hook(target, kind, function, tuple(names), reason, package))
        return function

    return declare


def hooks_of(role: str) -> list[Hook]:
    """The hooks of a role."""
    for module in ROLES[role]:
        import_module(f"sglang_scout.plugin.{module}")
    return [hook for hook in _declared if role in hook.roles]


def apply(hooks: Iterable[Hook]) -> None:
    """Resolve, register, apply and verify; SGLang itself only logs failures here.

    Raises:
        RuntimeError: a target is missing or was not patched.
    """
    targets = set()
    for hook in hooks:
        if hook.target_here is None or (hook.package and find_spec(hook.package) is None):
            continue
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
