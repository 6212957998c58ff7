"""Installs the hooks of this process.

The launcher gets the flags and, once it has read ``--kv-offload``, the request validation (``args.py``); the scheduler
process of such a server gets the hooks of its role. Without the flag SGLang is unchanged.
"""

from __future__ import annotations

from typing import Any

from sglang_scout.plugin.apply import apply
from sglang_scout.plugin.deployment import BACKEND_NAME
from sglang_scout.plugin.hooks import HOOKS
from sglang_scout.plugin.launch import launched_as
from sglang_scout.plugin.line import adapter
from sglang_scout.worker.die_with_parent import die_with_parent


def install() -> None:
    """Register the hooks of this process.

    Raises:
        RuntimeError: a target is missing or was not patched.
    """
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    adapter.add_fields()
    if BACKEND_NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND_NAME])
    apply(HOOKS["flags"])
    if launched := launched_as():
        # SGLang requests the same later; a scheduler whose launcher ended before that would fail without exiting,
        # because the transfer engine's threads keep it alive, and so would its attention process.
        die_with_parent(launched.launcher)
        apply(HOOKS[launched.role])
        if launched.role == "decode":
            register_backend()


def register_backend() -> None:
    """Make ``--decode-attention-backend scout`` known to SGLang."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(BACKEND_NAME)
    def create(runner: Any) -> Any:
        from sglang_scout.plugin.backend import ScoutAttnBackend

        return ScoutAttnBackend(runner)
