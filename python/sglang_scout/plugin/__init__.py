"""The only floor that imports SGLang, and its entry point of ``sglang.srt.plugins``.

The launcher gets the flags and, once it has read ``--kv-offload``, the hooks of HTTP (``launch.py``); a scheduler
process of such a server gets those of its role. Without the flag SGLang is unchanged. Nothing is imported here: SGLang
would swallow the error of an import that fails.
"""

from __future__ import annotations

import os
import sys


def register() -> None:
    """Apply the hooks of this process. SGLang calls it in the launcher and in each scheduler process."""
    try:
        _install()
    except Exception as error:
        # SGLang would log and swallow the error, and serve without the offload: not if the flag is on the command line,
        # where it need not be (Engine, YAML), nor in a scheduler of such a server.
        asked = any(arg.startswith("--kv-offload") for arg in sys.argv[1:])
        if asked or os.environ.get("SGLANG_SCOUT_ROLE"):
            lacks = isinstance(error, ImportError | AttributeError | OSError)  # a part of a package
            fix = "; run `sglang-scout doctor`, which says what to install" if lacks else ""
            what = f"sglang-scout: cannot serve with --kv-offload: {error}{fix}"
            raise SystemExit(what) from error
        raise


def _install() -> None:
    # Also without the flag: the kernels of SGLang 0.5.23 do not load without the driver's library.
    from sglang_scout.core.no_driver import stand_in_for_the_driver

    stand_in_for_the_driver()
    # Imported here, as an import fails with an SGLang that is not supported. The first one says so.
    from sglang_scout.plugin.hooks import apply, hooks_of  # isort: split
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    from sglang_scout.plugin.launch import launched_as
    from sglang_scout.plugin.limits import BACKEND_NAME
    from sglang_scout.worker.die_with_parent import die_with_parent

    if BACKEND_NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND_NAME])
    apply(hooks_of("flags"))
    if launched := launched_as():
        # SGLang does the same later; if the launcher ends before that, the transfer engine's threads keep the failed
        # scheduler alive, and its attention process.
        die_with_parent(launched.launcher)
        apply(hooks_of(launched.role))
