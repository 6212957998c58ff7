"""The releases of SGLang that the plugin works with, as plain data: for servers, and for commands that only look."""

from __future__ import annotations

from sglang_scout.core.errors import ConfigError

ADAPTERS = {"0.5.23": "sglang_0_5_23", "0.5.15.post1": "sglang_0_5_15"}
"""By version, the default first: the module of ``plugin/`` that has what differs."""


def check_version(found: str) -> None:
    """Refuse a release whose hooks nobody has checked.

    Raises:
        ConfigError: with those that are supported.
    """
    if found not in ADAPTERS:
        raise ConfigError(
            f"sglang {found} is installed, this sglang-scout works with {' and '.join(ADAPTERS)}; "
            f"install sglang=={next(iter(ADAPTERS))}"
        )
