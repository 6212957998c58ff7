"""Entry point of ``sglang.srt.plugins``.

SGLang logs and swallows an exception in a plugin, and would then serve without it. A server with ``--kv-offload`` must
not: such an error is raised as ``SystemExit``, which is not swallowed.
"""

import os
import sys


def register() -> None:
    """Called by SGLang in the launcher and again in each scheduler process."""
    try:
        from sglang_scout.plugin.install import install

        install()
    except Exception as error:
        # The flag need not be on the command line (Engine, YAML), but if it is, or if the launcher has already enabled
        # the offload, starting without it is wrong.
        asked = any(arg.startswith("--kv-offload") for arg in sys.argv[1:])
        if asked or os.environ.get("SGLANG_SCOUT_ROLE"):
            raise SystemExit(f"sglang-scout: cannot serve with --kv-offload: {error}") from error
        raise
