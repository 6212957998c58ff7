"""The step log, a JSON line per decode step, and the recall profile that is made of one: per-layer recall intervals
(paper section 3.4), as a versioned JSON file.

A log's first line is :class:`Facts`; each further one a :class:`Step`, written when its results have arrived, two
boundaries later: a killed server loses two steps.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from sglang_scout.core.config import FLAGS, OffloadConfig
from sglang_scout.core.errors import ConfigError

logger = logging.getLogger(__name__)

PROFILE_VERSION = 1
FLAG = FLAGS["recall_profile"]
REMAKE = "make one for this server with `sglang-scout profile`"
NEIGHBOURS = 4  # steps on each side over which a noisy curve is smoothed

LOG_FORMAT, LOG_VERSION = "sglang-scout-steps", 2
# First steps of a request, in which without a hint none of its pages are resident: the first selection is known two
# boundaries later, and resident one boundary after that.
COLD_STEPS = 3
# Keys of config.json about its writer, not about the model.
_NOT_THE_MODEL = {"_name_or_path", "transformers_version"}
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class ModelIdentity(msgspec.Struct, frozen=True):
    """Independent of the model's folder. Two trainings of one architecture have the same."""

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


class Facts(msgspec.Struct, frozen=True):
    """Required fields of the first line; the server adds more. ``selection`` has ``SELECTION_KEYS``."""

    format: str
    version: int
    policy: str
    recall: str
    model: str
    layers: int
    budget_tokens: int
    page_size_tokens: int
    identity: ModelIdentity
    selection: dict[str, str | int | float]
    lists: int = 1  # of pages, each of the budget, that a request selects in a layer


class Step(msgspec.Struct, frozen=True):
    """One decode step of B requests and L layers."""

    step: int
    start_us: int  # of its boundary, CLOCK_MONOTONIC
    step_us: int  # from there until its tokens are on the host
    ages: list[int]  # [B], previous steps of each request here
    full_pages: list[int]  # [B], of each request: the candidates
    cpu_pages: list[list[int]]  # [L, B], selected pages computed on the CPU
    gpu_wait_us: list[int]  # [L], that the device waited for them
    recalled_pages: int  # as the next two, of the recalls that ended at the next boundary
    recall_bytes: int
    recall_wait_us: int
    # [L], of predicted and real queries, mean over heads and requests; None: not predicted.
    query_cosine: list[float | None] = []


class StepLog:
    """Writes the lines of one server to ``path``, which is replaced; ``facts`` are those of :class:`Facts` and more."""

    def __init__(self, path: str, facts: Mapping[str, Any]) -> None:
        self._file = open(path, "wb", buffering=0)
        self.write({**facts, "format": LOG_FORMAT, "version": LOG_VERSION})

    def write(self, line: Mapping[str, Any] | Step) -> None:
        try:
            if not self._file.closed:
                self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            # A full disk must not fail requests.
            logger.error("cannot write the step log: %s; no more steps are written", error)
            self.close()

    def close(self) -> None:
        self._file.close()


class StepLogFile(NamedTuple):
    facts: Facts
    steps: list[Step]

    @property
    def budget_pages(self) -> int:
        return self.facts.budget_tokens // self.facts.page_size_tokens


def read_step_log(path: str | Path) -> StepLogFile:
    """All complete lines of a log; the server may still be writing."""
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]
        about = msgspec.json.decode(lines[0], type=dict) if lines else {}
        if (about.get("format"), about.get("version")) != (LOG_FORMAT, LOG_VERSION):
            raise ValueError(f"not a {LOG_FORMAT} file of version {LOG_VERSION}")
        facts = msgspec.convert(about, Facts)
        decoder = msgspec.json.Decoder(Step)
        steps = [decoder.decode(line) for line in lines[1:]]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"step log {str(path)!r}: cannot read it: {error}; give a file that "
            """--kv-offload-config '{"step_log": "FILE"}' made on a decode server"""
        ) from None
    return StepLogFile(facts, steps)


def ratios_by_age(log: StepLogFile) -> tuple[Floats, Counts]:
    """Mean CPU compute ratio ``[L, T]`` of requests longer than the budget by their age in steps, 0 without any, and
    ``[T]`` their number."""
    oldest = max((age for step in log.steps for age in step.ages), default=0)
    pages, rows = np.zeros((log.facts.layers, oldest + 1)), np.zeros(oldest + 1, np.int64)
    for step in log.steps:
        counts = np.array(step.full_pages) > log.budget_pages
        ages = np.array(step.ages, np.int64)[counts]
        np.add.at(rows, ages, 1)
        missed = np.array(step.cpu_pages, np.int64).reshape(len(pages), -1)[:, counts]
        np.add.at(pages, (slice(None), ages), missed)
    return pages / np.maximum(rows, 1) / (log.budget_pages * log.facts.lists), rows


class RecallProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """Contents of a profile file; a hand-written one may end with ``num_layers``."""

    version: int
    model: str
    page_size_tokens: int
    budget_tokens: int
    threshold: Annotated[float, Meta(ge=0.0, le=1.0)]
    # The largest number of steps between two recalls of each layer that kept its CPU compute ratio under `threshold` on
    # the profiled workload; 0 means never.
    intervals: list[Annotated[int, Meta(ge=0, le=2**31)]]
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
    return {key: getattr(config, key) for key in SELECTION_KEYS}


def config_digest(config: Mapping[str, Any]) -> str:
    """16 hex digits over the contents of a config.json, independent of order and formatting."""
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def smooth(curve: Floats, weights: Floats) -> Floats:
    """Local linear regression of a curve ``[T]``, with weights ``[T]`` > 0: a straight line stays, also at its ends."""
    result = np.empty(len(curve))
    for t in range(len(curve)):
        near = np.arange(max(0, t - NEIGHBOURS), min(t + NEIGHBOURS + 1, len(curve)))
        degree, w = min(1, len(near) - 1), np.sqrt(weights[near])
        result[t] = np.polyfit(near - t, curve[near], degree, w=w)[-1]  # at 0
    return result


def choose_interval(curve: Floats, samples: Floats, threshold: float) -> int:
    """The largest number of steps that keeps a layer's ratio at ``threshold`` or below (section 3.4): it ends where the
    smoothed curve first exceeds it, so an outlier does not end it early. 1 also if the first step already exceeds it; T
    if no step does: later ones were not measured.

    Args:
        curve: ``[T]`` mean ratio t = 1..T steps after the layer's pages were loaded.
        samples: ``[T]`` number of requests in each mean, > 0.
    """
    below = smooth(curve, samples) <= threshold + 1e-9
    return max(1, len(curve) if below.all() else int(np.argmin(below)))


def save_profile(profile: RecallProfile, path: str) -> None:
    values = msgspec.to_builtins(profile)
    lines = [f'"{key}": {json.dumps(value)}' for key, value in values.items()]
    Path(path).write_text("{" + ",\n ".join(lines) + "}\n", encoding="utf-8")


def _wrong(path: str, what: str, fix: str = REMAKE) -> ConfigError:
    return ConfigError(f"{FLAG} {path!r}: {what}; {fix}")


def load_profile(path: str) -> RecallProfile:
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
    config: OffloadConfig,
    model: str,
    identity: ModelIdentity,
) -> None:
    """Refuse a profile of another model, page size, budget or page selection, or of a threshold above that of fixed
    recall; ``model`` is for the message."""
    name, theirs = profile.model, profile.identity or identity
    page, budget = profile.page_size_tokens, profile.budget_tokens

    def differs(made_for: str, here: str, value: Any = None) -> NoReturn:
        fix = REMAKE if value is None else f"set that to {value!r} or {REMAKE}"
        raise _wrong(path, f"made for {made_for}, this server has {here}", fix)

    if (layers := profile.num_layers) != identity.num_layers:
        differs(f"{name!r} with {layers} layers", f"{model!r} with {identity.num_layers}")
    if theirs != identity:
        differs(f"{name!r} ({theirs.describe()})", f"{model!r} ({identity.describe()})")
    if page != config.page_size_tokens:
        differs(f"pages of {page} tokens", f"pages of {config.page_size_tokens}")
    if budget != config.budget_tokens:
        flag = f"--kv-offload-budget {config.budget_tokens}"
        differs(f"a budget of {budget} tokens", flag, budget)
    highest = config.recall_threshold
    if config.recall == "fixed" and highest is not None and profile.threshold > highest:
        made = f"a threshold of {profile.threshold:g}"
        differs(made, f"recall_threshold = {highest:g} in {FLAGS['config']}", profile.threshold)
    for key, here in selection_of(config).items():
        if (made := profile.selection.get(key, here)) != here:
            differs(f"{key} = {made!r}", f"{key} = {here!r} in --kv-offload-config", made)
