"""Entry point of ``sglang.srt.plugins``.

SGLang logs and swallows an exception in a plugin, and would then serve without it. A server that was
asked for ``--kv-offload`` must not: such an error leaves as ``SystemExit``, which is not swallowed.
"""

import os
import sys


def register() -> None:
    """Called by SGLang in the launcher and again in each scheduler process."""
    try:
        from sglang_scout.plugin.install import install

        install()
    except Exception as error:
        # A plain command line cannot be trusted to name the flag (Engine, YAML), but where it does,
        # or where the launcher has already switched the offload on, starting without it is wrong.
        asked = any(arg.startswith("--kv-offload") for arg in sys.argv[1:])
        if asked or os.environ.get("SGLANG_SCOUT_ROLE"):
            raise SystemExit(f"sglang-scout: cannot serve with --kv-offload: {error}") from error
        raise
