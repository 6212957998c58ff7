"""Values of the flags and of ``--kv-offload-config`` that exclude or need each other."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sglang_scout.core.config import DEFAULT_RECALL_THRESHOLD, FLAGS, OffloadConfig
from sglang_scout.core.config_keys import FILE_KEYS
from sglang_scout.core.errors import ConfigError

_PREDICTION_KEYS = ("predictor", "predictor_file", "exact_layers", "exact_steps")
_RECALL_KEYS = ("recall_interval", "recall_threshold", "recall_step_mib", "recall_link_share")


def keys_without_effect(
    digest: str = "minmax",
    precompute: bool = True,
    recall: str = "adaptive",
    has_profile: bool = False,
    policy: str = "scout",
) -> dict[str, str]:
    """Keys of ``--kv-offload-config`` that mean nothing beside these values, each with the one that
    makes it so.

    All are refused, those of recall where they differ from their defaults.
    """
    idle = {"head_reduce": "digest = 'signs'"} if digest == "signs" else {}
    if not precompute:
        idle |= dict.fromkeys(_PREDICTION_KEYS, "precompute = false")
    if policy == "infinigen":
        idle |= dict.fromkeys(_RECALL_KEYS, "--kv-offload infinigen")
        if recall != "off":  # which is what it does
            idle["recall"] = "--kv-offload infinigen"
    elif recall != "adaptive":
        cause = f"recall = {recall!r}"
        idle |= dict.fromkeys(_RECALL_KEYS, cause)
        if recall == "fixed":
            del idle["recall_interval"]
    elif has_profile:
        idle["recall_interval"] = FLAGS["recall_profile"]
    return idle


def check_together(config: OffloadConfig, given: set[str], flags: Mapping[str, str]) -> None:
    """Values that mean something only together; ``given`` are the keys that the user wrote.

    Raises:
        ConfigError: naming both.
    """
    flag = flags["config"]
    has_profile = config.recall_profile is not None
    idle = keys_without_effect(
        config.digest, config.precompute, config.recall, has_profile, config.policy
    )
    if config.quality:
        idle.pop("predictor_file", None)  # measured beside what serves
    for key, cause in sorted(idle.items()):
        value = getattr(config, key)
        default = (
            DEFAULT_RECALL_THRESHOLD if key == "recall_threshold" else getattr(OffloadConfig, key)
        )
        is_default = key in ("recall", *_RECALL_KEYS) and value == default
        if key in given and not is_default:
            raise ConfigError(
                f"{flag}: {key} = {value!r} has no effect with {cause}; drop one of them"
            )
    if has_profile and (config.policy == "infinigen" or config.recall in ("off", "fixed")):
        cause = f"recall = {config.recall!r}"
        if config.policy == "infinigen":
            cause = "--kv-offload infinigen"
        raise ConfigError(
            f"{flags['recall_profile']} {config.recall_profile!r}: has no effect with {cause}; drop one "
            "of them"
        )
    if config.trace is None and config.trace_steps != OffloadConfig.trace_steps:
        raise ConfigError(
            f"{flag}: trace_steps = {config.trace_steps} needs trace, the file that they are written to"
        )
    _check_different_files(config, flag)
    if config.policy == "infinigen" and config.cpu_pages != "model":
        raise ConfigError(
            f"{flag}: cpu_pages = {config.cpu_pages!r}: --kv-offload infinigen copies its pages to the "
            "device, and copies for the worker would only take host memory; drop the key"
        )
    if config.predictor == "learned" and config.predictor_file is None:
        raise ConfigError(
            f"{flag}: predictor = 'learned' needs predictor_file; make one with "
            "benchmark/predicted_query.py"
        )
    if config.predictor_file is not None and config.predictor != "learned" and not config.quality:
        raise ConfigError(
            f"{flag}: predictor_file = {config.predictor_file!r} has no effect with predictor = "
            f"{config.predictor!r}; choose predictor = 'learned' or drop the file"
        )
    if config.resident_bonus and config.digest != "signs":
        raise ConfigError(
            f"{flag}: resident_bonus = {config.resident_bonus!r} is in units of the scores of digest = "
            f"'signs'; choose that digest or drop the bonus"
        )
    if config.quality_inputs and not config.quality:
        raise ConfigError(
            f"{flag}: quality_inputs = {config.quality_inputs} needs quality, the file beside "
            "which they are written"
        )


def _check_different_files(config: OffloadConfig, flag: str) -> None:
    taken: dict[str, str] = {}
    for key in FILE_KEYS:
        path = getattr(config, key)
        if path is None:
            continue
        other = taken.setdefault(os.path.realpath(path), key)
        if other != key:
            raise ConfigError(f"{flag}: {key} = {path!r}: is the file of {other} too; name another")
