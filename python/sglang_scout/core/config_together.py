"""Values of the flags and of ``--kv-offload-config`` that exclude or need each other."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.config_keys import FILE_KEYS
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.files import check_different

_PREDICTION_KEYS = ("predictor", "predictor_file", "exact_layers", "exact_steps")


def keys_without_effect(digest: str = "minmax", precompute: bool = True) -> dict[str, str]:
    """Keys of ``--kv-offload-config`` that are refused beside these values, each with the one that makes
    it idle.

    Those of recall are not among them: who switches it off to compare leaves the rest as it is.
    """
    idle = {"head_reduce": "digest = 'signs'"} if digest == "signs" else {}
    if not precompute:
        idle |= dict.fromkeys(_PREDICTION_KEYS, "precompute = false")
    return idle


def check_together(config: OffloadConfig, given: set[str], flags: Mapping[str, str]) -> None:
    """Values that mean something only together; ``given`` are the keys that the user wrote.

    Raises:
        ConfigError: naming both.
    """
    flag = flags["config"]
    idle = keys_without_effect(config.digest, config.precompute)
    if config.quality:
        idle.pop("predictor_file", None)  # measured beside what serves
    for key, cause in sorted(idle.items()):
        if key in given:
            raise ConfigError(
                f"{flag}: {key} = {getattr(config, key)!r} has no effect with {cause}; drop one of them"
            )
    profile = config.recall_profile
    of_profile = flags["recall_profile"], f"{flags['recall_profile']} {profile!r}", profile
    check_different([of_profile, *named_files(config, flag)])
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


def named_files(config: OffloadConfig, flag: str) -> list[tuple[str, str, str | None]]:
    """The files of the keys of ``flag``, as :func:`check_different` takes them."""
    paths = [(key, getattr(config, key)) for key in FILE_KEYS]
    files = [(key, f"{flag}: {key} = {path!r}", path) for key, path in paths]
    if config.quality and config.quality_inputs:
        path = f"{config.quality}.npz"
        files.append(("quality_inputs", f"{flag}: quality_inputs, kept in {path!r}", path))
    return files
