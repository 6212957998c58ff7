"""From the raw values of the flags to an :class:`OffloadConfig`, or to an error that says what to change."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_scout.core.config import (
    DEFAULT_BUDGET_TOKENS,
    FLAGS,
    KEYS,
    PAGE_SIZE_TOKENS,
    PUBLIC_KEYS,
    WRITTEN_KEYS,
    OffloadConfig,
)
from sglang_scout.core.cpu_list import parse_cpu_list
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.files import check_different, check_writable

MAX_BUDGET_TOKENS = 2**40

# Command-line values are typed already; values from Python may be anything.
_FLAG_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "policy": ((str,), "the name of a policy, for example 'scout'"),
    "budget_tokens": ((int,), f"a whole number of tokens, for example {DEFAULT_BUDGET_TOKENS}"),
    "host_gb": ((int, float), "a number of GiB, for example 64.0"),
    "recall_profile": ((str,), "the name of a file, or leave it out"),
    "cpus": ((str,), "a list as text, for example '0-3,8'"),
    "config": ((str, Mapping), "a JSON object as text or as a dict, or '@FILE'"),
}
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
}


def load_json(text: str, flag: str = FLAGS["config"]) -> dict[str, Any]:
    """The object in ``text``, or in the file if ``text`` is ``@FILE``.

    Raises:
        ConfigError: neither; names ``flag`` and the value.
    """
    example = "write for example '{\"recall_interval\": 8}' or @FILE"
    try:
        source = Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {text!r}: cannot read the file: {error}; {example}") from None
    try:
        value = json.loads(source, object_pairs_hook=_without_repeats)
    except (RecursionError, ValueError) as error:  # also: too deep, or a number of too many digits
        raise ConfigError(f"{flag} {text[:60]!r}: not valid JSON ({error}); {example}") from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{flag} {text!r}: expected a JSON object, got {type(value).__name__}; {example}"
        )
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key occurs twice in {[name for name, _ in pairs]}")
    return found


def _check_value(name: str, value: Any, flag: str) -> Any:
    """One entry of ``flag``, checked against the table of keys."""
    if name not in KEYS:
        near = difflib.get_close_matches(str(name), KEYS, n=1, cutoff=0.75)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(PUBLIC_KEYS)}"
        raise ConfigError(f"{flag}: unknown key {name!r} (value {value!r}); {hint}")
    key = KEYS[name]
    what = f"{flag}: {name} = {value!r}"
    if key.kind == "tuple[int, ...]":
        is_list = isinstance(value, (list, tuple))
        if not is_list or not all(type(layer) is int and layer >= 0 for layer in value):
            raise ConfigError(f"{what}: expected a list of layer numbers, for example [1, 2]")
        return tuple(sorted(set(value)))
    types = _KINDS[key.kind]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ConfigError(
            f"{what} is of type {type(value).__name__}; "
            f"expected {' or '.join(t.__name__ for t in types)}"
        )
    if key.limits and not key.limits[0] <= value <= key.limits[1]:
        low, high = (str(x) if isinstance(x, int) else f"{x:g}" for x in key.limits)
        raise ConfigError(f"{what} must be between {low} and {high}")
    if key.multiple_of > 1 and value % key.multiple_of:
        raise ConfigError(f"{what} must be a multiple of the page size ({key.multiple_of} tokens)")
    if key.choices and value not in key.choices:
        raise ConfigError(f"{what}; choose one of {', '.join(key.choices)}")
    if key.is_written and not (value and value.isprintable()):
        raise ConfigError(f"{what}: not a file name; name a file, or drop the key")
    return value


def idle_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """Keys without effect given the other ``values``, each with the setting that makes it idle.

    Recall keys are exempt, so that recall can be switched off for comparison with the rest unchanged.
    """
    return {
        name: f"{key.needs[0]} = {json.dumps(found)}"
        for name, key in KEYS.items()
        if key.needs
        and (found := values.get(key.needs[0], KEYS[key.needs[0]].default)) != key.needs[1]
    }


def check_layers(config: OffloadConfig, num_layers: int) -> None:
    """Refuse layers that the model does not have."""
    if max(config.exact_layers, default=0) >= num_layers:
        raise ConfigError(
            f"{FLAGS['config']}: exact_layers = {list(config.exact_layers)}: the model has layers 0 to "
            f"{num_layers - 1}; name some of these, or drop the key"
        )


def written_files(config: OffloadConfig, flag: str) -> list[tuple[str, str, str | None]]:
    """The files of the keys of ``flag``, as :func:`check_different` takes them."""
    paths = [(key, getattr(config, key)) for key in WRITTEN_KEYS]
    return [(key, f"{flag}: {key} = {path!r}", path) for key, path in paths]


def check_files(config: OffloadConfig) -> None:
    """Refuse files that cannot be written, by opening them. Their contents are kept.

    To be called in the process that uses them: another machine may lack their folders.
    """
    for _, what, path in written_files(config, FLAGS["config"]):
        if path is not None:
            check_writable(what, path)


def _check_flag_types(given: dict[str, Any], flags: Mapping[str, str]) -> None:
    """Raises ConfigError for the first value that is not of its flag's type."""
    for name, value in given.items():
        types, expected = _FLAG_TYPES[name]
        if not isinstance(value, types) or isinstance(value, bool):
            raise ConfigError(
                f"{flags[name]} {value!r}: is of type {type(value).__name__}; expected {expected}"
            )
        if value == "" and name != "config":  # not JSON, reported below
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


def _check_together(
    config: OffloadConfig,
    keys: Mapping[str, Any],
    defaults: Mapping[str, Any],
    flags: Mapping[str, str],
) -> None:
    """Values that exclude or need each other."""
    forced = config.sink_pages + config.recent_pages
    if forced > config.budget_pages:
        plural = "" if config.budget_pages == 1 else "s"
        raise ConfigError(
            f"{flags['budget_tokens']} {config.budget_tokens}: holds {config.budget_pages} page{plural}, fewer "
            f"than sink_pages + recent_pages = {forced}; raise it to at least {forced * PAGE_SIZE_TOKENS}"
        )
    flag, profile = flags["config"], config.recall_profile
    if config.recall == "profile" and not profile:
        raise ConfigError(f"{flag}: recall = 'profile' needs {flags['recall_profile']} FILE")
    for name, cause in idle_keys({**defaults, **keys}).items():
        if name in keys:
            needed = (KEYS[name].needs or ("",))[0]
            with_what = cause if needed in keys else f"{flags['policy']} {config.policy}"
            raise ConfigError(
                f"{flag}: {name} = {keys[name]!r} has no effect with {with_what}; drop one of them"
            )
    of_profile = flags["recall_profile"], f"{flags['recall_profile']} {profile!r}", profile
    check_different([of_profile, *written_files(config, flag)])


def parse_config(
    *,
    policy: str,
    policies: Mapping[str, Mapping[str, Any]],
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
        policy: value of ``--kv-offload``.
        policies: the known ones besides ``none``, each with its overrides of keys' defaults, or with the overrides that
            a key makes if true.
        budget_tokens .. config: raw values of the other flags; None where not given.
            ``config`` may be the object itself.
        available_cpus: CPUs of this process; None: ask the kernel.
        flags: names of the arguments, as ``FLAGS``.
    Raises:
        ConfigError: a value is wrong, or of a wrong type; the message names flag, value and fix.
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
    defaults = {"budget_tokens": DEFAULT_BUDGET_TOKENS, **policies.get(policy, {})}
    if budget_tokens is not None:
        defaults["budget_tokens"] = budget_tokens
    _check_budget(defaults["budget_tokens"], flags["budget_tokens"])
    if host_gb is not None and not host_gb > 0:
        raise ConfigError(
            f"{flags['host_gb']} {host_gb}: must be greater than 0; give the GiB for KV pages, or drop the flag"
        )
    raw = load_json(config, flags["config"]) if isinstance(config, str) else config or {}
    keys = {name: _check_value(name, value, flags["config"]) for name, value in raw.items()}
    for name in keys:
        if not KEYS[name].is_general and name not in defaults:
            owners = [other for other, known in policies.items() if name in known]
            raise ConfigError(
                f"{flags['config']}: {name} = {keys[name]!r} has no effect with {flags['policy']} {policy}; it is for "
                f"{' and '.join(owners)}; drop it"
            )
    for name, changes in policies.get(policy, {}).items():
        if isinstance(changes, Mapping):
            del defaults[name]
            defaults |= changes if keys.get(name) else {}
    result = OffloadConfig(
        policy=policy,
        host_gb=host_gb,
        recall_profile=recall_profile,
        cpus=None if cpus is None else parse_cpu_list(cpus, available_cpus, flags["cpus"]),
        **{**defaults, **keys},
    )
    _check_together(result, keys, defaults, flags)
    return result
