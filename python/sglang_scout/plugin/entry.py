"""Entry point of ``sglang.srt.plugins``.

The launcher gets the flags and, once it has read ``--kv-offload``, the request validation (``launch.py``); the
scheduler process of such a server gets the hooks of its role. Without the flag SGLang is unchanged.

SGLang logs and swallows an exception in a plugin, and would then serve without it. A server with ``--kv-offload`` must
not: such an error is raised as ``SystemExit``, which is not swallowed.
"""

import os
import sys


def register() -> None:
    """Called by SGLang in the launcher and again in each scheduler process."""
    try:
        install()
    except Exception as error:
        # The flag need not be on the command line (Engine, YAML), but if it is, or if the launcher has already enabled
        # the offload, starting without it is wrong.
        asked = any(arg.startswith("--kv-offload") for arg in sys.argv[1:])
        if asked or os.environ.get("SGLANG_SCOUT_ROLE"):
            raise SystemExit(f"sglang-scout: cannot serve with --kv-offload: {error}") from error
        raise


def install() -> None:
    """Apply the hooks of this process."""
    # Imported here, as an import fails with an SGLang that is not supported. The first one says so.
    from sglang_scout.plugin.release import adapter

    adapter.add_fields()

    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    from sglang_scout.plugin.hooks import apply, hooks_of
    from sglang_scout.plugin.launch import launched_as
    from sglang_scout.plugin.limits import BACKEND_NAME
    from sglang_scout.worker.die_with_parent import die_with_parent

    if BACKEND_NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND_NAME])
    apply(hooks_of("flags"))
    if launched := launched_as():
        # SGLang requests the same later; a scheduler whose launcher ended before that would fail without exiting,
        # because the transfer engine's threads keep it alive, and so would its attention process.
        die_with_parent(launched.launcher)
        apply(hooks_of(launched.role))
