"""Supported SGLang releases, as plain data: for servers, and for commands that do not import SGLang."""

from __future__ import annotations

from sglang_scout.core.errors import ConfigError

ADAPTERS = {"0.5.23": "sglang_0_5_23", "0.5.15.post1": "sglang_0_5_15"}
"""Adapter module of ``plugin/`` by SGLang version, the default first."""


def check_version(found: str) -> None:
    """Refuse a release whose hooks have not been checked."""
    if found not in ADAPTERS:
        raise ConfigError(
            f"sglang {found} is installed, but this sglang-scout supports only {' and '.join(ADAPTERS)}; "
            f"install sglang=={next(iter(ADAPTERS))}"
        )
