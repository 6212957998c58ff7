"""Applies hooks and verifies them."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib.util import find_spec

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_scout.plugin.hooks import Hook
from sglang_scout.plugin.line import VERSION

_INSTALL = f"install sglang=={VERSION} unmodified, and no other plugin"


def apply(hooks: Iterable[Hook]) -> None:
    """Resolve, register, apply and verify; SGLang itself only logs failures here."""
    targets = set()
    for hook in hooks:
        name = hook.target_in(VERSION)
        if name is None or (hook.package and find_spec(hook.package) is None):
            continue
        target = f"sglang.srt.{name}"
        try:
            pkgutil.resolve_name(target)
        except Exception as error:
            raise RuntimeError(
                f"hook target {target} is not in this SGLang: {error}; {_INSTALL}"
            ) from error
        function = pkgutil.resolve_name(f"sglang_scout.plugin.{hook.function}")
        HookRegistry.register(target, function, HookType(hook.kind))
        targets.add(target)
    HookRegistry.apply_hooks()
    if absent := sorted(targets - HookRegistry._patched):
        raise RuntimeError(f"hooks that were not applied: {', '.join(absent)}; {_INSTALL}")
