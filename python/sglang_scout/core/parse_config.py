"""From the raw values of the flags to an :class:`OffloadConfig`, or to an error that says what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_scout.core.config import (
    DEFAULT_BUDGET_TOKENS,
    FLAGS,
    PAGE_SIZE_TOKENS,
    OffloadConfig,
)
from sglang_scout.core.config_keys import check_key, load_json
from sglang_scout.core.config_together import check_together
from sglang_scout.core.cpu_list import parse_cpu_list
from sglang_scout.core.errors import ConfigError

MAX_BUDGET_TOKENS = 2**40

# From the command line values have their types already; from Python they may be anything.
_FLAG_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "policy": ((str,), "the name of a policy, for example 'scout'"),
    "budget_tokens": ((int,), f"a whole number of tokens, for example {DEFAULT_BUDGET_TOKENS}"),
    "host_gb": ((int, float), "a number of GiB, for example 64.0"),
    "recall_profile": ((str,), "the name of a file, or leave it out"),
    "cpus": ((str,), "a list as text, for example '0-3,8'"),
    "config": ((str, Mapping), "a JSON object as text or as a dict, or '@FILE'"),
}


def _check_flag_types(given: dict[str, Any], flags: Mapping[str, str]) -> None:
    """Raises ConfigError for the first value that is of another type than its flag's."""
    for name, value in given.items():
        types, expected = _FLAG_TYPES[name]
        if not isinstance(value, types) or isinstance(value, bool):
            raise ConfigError(
                f"{flags[name]} {value!r}: is a {type(value).__name__}; expected {expected}"
            )
        if value == "" and name != "config":  # that one is no JSON, which is said below
            raise ConfigError(f"{flags[name]} '': is empty; expected {expected}")


def _check_budget(budget_tokens: int, flag: str) -> None:
    page = PAGE_SIZE_TOKENS
    if not 0 < budget_tokens <= MAX_BUDGET_TOKENS or budget_tokens % page:
        nearest = (budget_tokens + page // 2) // page * page
        least = (OffloadConfig.sink_pages + OffloadConfig.recent_pages) * page
        raise ConfigError(
            f"{flag} {budget_tokens}: must be a positive multiple of the page size "
            f"({page} tokens); the nearest is {min(max(least, nearest), MAX_BUDGET_TOKENS)}"
        )


def parse_config(
    *,
    policy: str,
    policies: tuple[str, ...],
    budget_tokens: int | None = None,
    host_gb: float | None = None,
    recall_profile: str | None = None,
    cpus: str | None = None,
    config: str | Mapping[str, Any] | None = None,
    available_cpus: set[int] | None = None,
    flags: Mapping[str, str] = FLAGS,
) -> OffloadConfig:
    """Build the configuration from the flags' raw values.

    Args:
        policy: value of ``--kv-offload``; ``policies`` are the known ones besides ``none``.
        budget_tokens .. config: raw values of the other flags; None where not given.
            ``config`` may be the object itself.
        available_cpus: CPUs of this process; None: ask the kernel.
        flags: what to call the arguments, as ``FLAGS``.
    Raises:
        ConfigError: a value is wrong, or of a wrong type; the text names flag, value and fix.
    """
    given = {
        "policy": policy,
        "budget_tokens": budget_tokens,
        "host_gb": host_gb,
        "recall_profile": recall_profile,
        "cpus": cpus,
        "config": config,
    }
    _check_flag_types({k: x for k, x in given.items() if x is not None or k == "policy"}, flags)
    if policy != "none" and policy not in policies:
        raise ConfigError(
            f"{flags['policy']} {policy!r}: unknown policy; choose one of none, {', '.join(policies)}"
        )
    page = PAGE_SIZE_TOKENS
    budget = DEFAULT_BUDGET_TOKENS if budget_tokens is None else budget_tokens
    _check_budget(budget, flags["budget_tokens"])
    if host_gb is not None and not host_gb > 0:
        raise ConfigError(
            f"{flags['host_gb']} {host_gb}: must be greater than 0; name the GiB for KV pages, or drop it"
        )
    keys = load_json(config, flags["config"]) if isinstance(config, str) else config or {}
    values: dict[str, Any] = {
        key: check_key(key, value, flags["config"]) for key, value in keys.items()
    }
    result = OffloadConfig(
        policy=policy,
        budget_tokens=budget,
        host_gb=host_gb,
        recall_profile=recall_profile,
        cpus=None if cpus is None else parse_cpu_list(cpus, available_cpus, flags["cpus"]),
        **values,
    )
    forced = result.sink_pages + result.recent_pages
    if forced > result.budget_pages:
        plural = "" if result.budget_pages == 1 else "s"
        raise ConfigError(
            f"{flags['budget_tokens']} {budget}: holds {result.budget_pages} page{plural}, fewer than "
            f"sink_pages + recent_pages = {forced}; raise it to at least {forced * page}"
        )
    if result.recall == "profile" and not recall_profile:
        raise ConfigError(
            f"{flags['config']}: recall = 'profile' needs {flags['recall_profile']} FILE"
        )
    check_together(result, set(values), flags)
    if result.resident_tokens is not None and result.resident_tokens % page:
        raise ConfigError(
            f"{flags['config']}: resident_tokens = {result.resident_tokens} must be a "
            f"multiple of the page size ({page} tokens)"
        )
    return result
