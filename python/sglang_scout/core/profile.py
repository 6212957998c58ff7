"""The recall profile: per-layer recall intervals found offline (paper section 3.4), as a versioned JSON file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from sglang_scout.core.config import FLAGS, OffloadConfig
from sglang_scout.core.errors import ConfigError

PROFILE_VERSION = 1
FLAG = FLAGS["recall_profile"]
MAX_INTERVAL = 2**31
REMAKE = "make one for this server with `sglang-scout profile`"
NEIGHBOURS = 4
"""Steps on each side over which a noisy curve is smoothed."""

# Keys of config.json about its writer, not about the model.
_NOT_THE_MODEL = {"_name_or_path", "transformers_version"}
Floats = npt.NDArray[np.float64]


class ModelIdentity(msgspec.Struct, frozen=True):
    """Identifies a model, independent of its folder. Two trainings of one architecture have the same."""

    architecture: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    config_digest: str

    def describe(self) -> str:
        return (
            f"{self.architecture} with {self.num_layers} layers, {self.num_q_heads} query and "
            f"{self.num_kv_heads} KV heads of {self.head_dim}, config {self.config_digest}"
        )


class RecallProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """Contents of a profile file; a hand-written one may end with ``num_layers``."""

    version: int
    model: str
    page_size_tokens: int
    budget_tokens: int
    threshold: Annotated[float, Meta(ge=0.0, le=1.0)]
    # The largest number of steps between two recalls of each layer that kept its CPU compute ratio under `threshold` on
    # the profiled workload; 0 means never.
    intervals: list[Annotated[int, Meta(ge=0, le=MAX_INTERVAL)]]
    num_layers: int
    workload: str = ""
    identity: ModelIdentity | None = None
    # curves[l][t-1] is the ratio of layer l, t steps after a request's first selection was loaded, without recall;
    # samples[t-1] the number of requests in it.
    samples: list[int] = []
    curves: list[list[float]] = []
    made_by: str = ""
    selection: dict[str, str | int | float] = {}  # SELECTION_KEYS; an absent one is not checked
    query_cosine: list[float | None] = []  # mean of each layer; None: not predicted


SELECTION_KEYS = ("digest", "sink_pages", "recent_pages")
"""Configuration that determines which pages a query selects, and so how fast the selection drifts."""


def selection_of(config: OffloadConfig) -> dict[str, str | int | float]:
    """The ``selection`` of a profile made with ``config``."""
    return {key: getattr(config, key) for key in SELECTION_KEYS}


def config_digest(config: Mapping[str, Any]) -> str:
    """16 hex digits over the contents of a config.json, independent of order and formatting."""
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def smooth(curve: Floats, weights: Floats) -> Floats:
    """Local linear regression at each point of a curve ``[T]``, with weights ``[T]`` > 0. A straight line is unchanged,
    also at its ends."""
    result = np.empty(len(curve))
    for t in range(len(curve)):
        near = np.arange(max(0, t - NEIGHBOURS), min(t + NEIGHBOURS + 1, len(curve)))
        degree, w = min(1, len(near) - 1), np.sqrt(weights[near])
        result[t] = np.polyfit(near - t, curve[near], degree, w=w)[-1]  # at 0
    return result


def choose_interval(curve: Floats, samples: Floats, threshold: float) -> int:
    """The largest number of steps that keeps a layer's ratio at ``threshold`` or below (section 3.4): it ends where the
    smoothed curve first exceeds it, so an outlier does not end it early.

    Args:
        curve: ``[T]`` mean ratio t = 1..T steps after the layer's pages were loaded.
        samples: ``[T]`` number of requests in each mean, > 0.
    Returns:
        1..T. 1 also if the first step already exceeds it; T if no step does: later ones were not measured.
    """
    below = smooth(curve, samples) <= threshold + 1e-9
    return max(1, len(curve) if below.all() else int(np.argmin(below)))


def save_profile(profile: RecallProfile, path: str) -> None:
    """Write a profile, one key per line."""
    values = msgspec.to_builtins(profile)
    lines = [f'"{key}": {json.dumps(value)}' for key, value in values.items()]
    Path(path).write_text("{" + ",\n ".join(lines) + "}\n", encoding="utf-8")


def _wrong(path: str, what: str, fix: str = REMAKE) -> ConfigError:
    return ConfigError(f"{FLAG} {path!r}: {what}; {fix}")


def load_profile(path: str) -> RecallProfile:
    """Read and check a profile file."""
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        fix = "name one that `sglang-scout profile` wrote"
        raise _wrong(path, f"cannot read the file: {error}", fix) from None
    try:
        profile = msgspec.json.decode(data, type=RecallProfile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _wrong(path, f"not a recall profile: {error}") from None
    version, layers, intervals = profile.version, profile.num_layers, profile.intervals
    if version != PROFILE_VERSION:
        what = f"has version {version}, but this release reads version {PROFILE_VERSION}"
        raise _wrong(path, what)
    if not intervals or len(intervals) != layers:
        what = f"needs one interval for each of {layers} layers, found {intervals!r}"
        raise _wrong(path, what)
    return profile


def check_profile(
    profile: RecallProfile,
    path: str,
    *,
    num_layers: int,
    config: OffloadConfig,
    model: str,
    identity: ModelIdentity,
) -> None:
    """Refuse a profile of another model, page size, budget or page selection; ``model`` is for the message."""
    name, theirs = profile.model, profile.identity or identity
    if profile.num_layers != num_layers:
        what = f"made for {name!r} with {profile.num_layers} layers, {model!r} has {num_layers}"
        raise _wrong(path, what)
    if theirs != identity:
        here = f"this server has {model!r} ({identity.describe()})"
        raise _wrong(path, f"made for {name!r} ({theirs.describe()}), {here}")
    if profile.page_size_tokens != config.page_size_tokens:
        made = f"made for pages of {profile.page_size_tokens} tokens"
        raise _wrong(path, f"{made}, this server uses {config.page_size_tokens}")
    tokens = profile.budget_tokens
    if tokens != config.budget_tokens:
        here = f"this server has --kv-offload-budget {config.budget_tokens}"
        fix = f"set that to {tokens} or {REMAKE}"
        raise _wrong(path, f"made for a budget of {tokens} tokens, {here}", fix)
    for key, value in selection_of(config).items():
        if (made := profile.selection.get(key, value)) != value:
            here = f"this server has {key} = {value!r} in --kv-offload-config"
            fix = f"set that to {made!r} or {REMAKE}"
            raise _wrong(path, f"made for {key} = {made!r}, {here}", fix)
