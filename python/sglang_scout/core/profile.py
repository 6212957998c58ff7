"""The recall profile: per-layer recall intervals found offline (paper section 3.4), as a versioned JSON file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sglang_scout.core.errors import ConfigError

PROFILE_VERSION = 1


class RecallProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """Contents of a profile file.

    ``intervals[l]`` is the largest number of steps between two recalls of layer l that kept its
    CPU compute ratio under ``threshold`` on the profiled workload; 0 means never.
    """

    version: int
    model: str
    page_size_tokens: int
    budget_tokens: int
    threshold: float
    intervals: list[int]
    num_layers: int
    workload: str = ""


def load_profile(path: str) -> RecallProfile:
    """Read and check a profile file.

    Raises:
        ConfigError: unreadable, not a profile, or of another version.
    """
    flag = "--kv-offload-recall-profile"
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path!r}: cannot read the file: {error.strerror}") from None
    try:
        profile = msgspec.json.decode(data, type=RecallProfile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path!r}: not a recall profile: {error}") from None
    if profile.version != PROFILE_VERSION:
        raise ConfigError(
            f"{flag} {path!r}: version {profile.version}, this build reads {PROFILE_VERSION}; "
            "make the profile anew"
        )
    if len(profile.intervals) != profile.num_layers or min(profile.intervals, default=-1) < 0:
        raise ConfigError(
            f"{flag} {path!r}: needs one interval >= 0 for each of {profile.num_layers} layers, "
            f"found {profile.intervals!r}"
        )
    return profile


def check_profile(
    profile: RecallProfile, path: str, *, num_layers: int, page_size_tokens: int, model: str
) -> None:
    """Refuse a profile that was made for another model shape or page size.

    Raises:
        ConfigError: naming what differs.
    """
    flag = "--kv-offload-recall-profile"
    if profile.page_size_tokens != page_size_tokens:
        raise ConfigError(
            f"{flag} {path!r}: made for pages of {profile.page_size_tokens} tokens, this server "
            f"uses {page_size_tokens}; make one for this server"
        )
    if profile.num_layers != num_layers:
        raise ConfigError(
            f"{flag} {path!r}: made for {profile.model!r} with {profile.num_layers} layers, "
            f"{model!r} has {num_layers}; make one for this model"
        )
