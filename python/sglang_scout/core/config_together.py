"""Values of the flags and of ``--kv-offload-config`` that exclude or need each other."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_scout.core.config import WRITTEN_KEYS, OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.files import check_different

_PREDICTION_KEYS = ("exact_layers", "exact_steps")


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
    for key, cause in sorted(idle.items()):
        if key in given:
            raise ConfigError(
                f"{flag}: {key} = {getattr(config, key)!r} has no effect with {cause}; drop one of them"
            )
    profile = config.recall_profile
    of_profile = flags["recall_profile"], f"{flags['recall_profile']} {profile!r}", profile
    check_different([of_profile, *named_files(config, flag)])
    if config.resident_bonus and config.digest != "signs":
        raise ConfigError(
            f"{flag}: resident_bonus = {config.resident_bonus!r} is in units of the scores of digest = "
            f"'signs'; choose that digest or drop the bonus"
        )


def named_files(config: OffloadConfig, flag: str) -> list[tuple[str, str, str | None]]:
    """The files of the keys of ``flag``, as :func:`check_different` takes them."""
    paths = [(key, getattr(config, key)) for key in WRITTEN_KEYS]
    return [(key, f"{flag}: {key} = {path!r}", path) for key, path in paths]
