"""Servers reach themselves and the other half of their pair directly.

SGLang asks both by ``requests``, which goes to the proxy of ``http_proxy`` or ``all_proxy`` for any host that
``no_proxy`` does not name.
"""

from __future__ import annotations

import os
from typing import Any


def reach_directly(host: str) -> None:
    """In the launcher, for the warm-up. Other processes inherit it, and still download a model through the proxy.

    Args:
        host: as ``--host``.
    """
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if given != "*":
        names = (given, host, "localhost", "127.0.0.1", "::1")
        os.environ["no_proxy"] = ",".join(filter(None, names))


def before_kv_manager(*_: Any, **__: Any) -> None:
    """In a scheduler process, which has loaded its model and talks to the other servers from here on."""
    os.environ["no_proxy"] = "*"
