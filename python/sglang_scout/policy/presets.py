"""Named policies. A new one is a row here; the engine does not change."""

from __future__ import annotations

from collections.abc import Callable

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.profile import RecallProfile
from sglang_scout.policy.axes import Policy, PredictorAxis
from sglang_scout.policy.digests import MinMaxDigest
from sglang_scout.policy.missing import CopyAhead, CpuAttention
from sglang_scout.policy.predictors import CurrentQuery, NextLayerQuery
from sglang_scout.policy.residency import ImportantPages


def _digest(config: OffloadConfig) -> MinMaxDigest:
    return MinMaxDigest(config.head_reduce, config.sink_pages, config.recent_pages)


def _predictor(config: OffloadConfig) -> PredictorAxis:
    return NextLayerQuery() if config.precompute else CurrentQuery()


def _scout(config: OffloadConfig, num_layers: int, profile: RecallProfile | None) -> Policy:
    intervals = (
        tuple(profile.intervals)
        if config.recall == "profile" and profile is not None
        else (config.recall_interval,) * num_layers
    )
    return Policy(
        name="scout",
        digest=_digest(config),
        predictor=_predictor(config),
        missing=CpuAttention(),
        residency=ImportantPages(intervals, enabled=config.recall != "off"),
    )


def _infinigen(config: OffloadConfig, num_layers: int, profile: RecallProfile | None) -> Policy:
    """Recall-based offload as the paper's baseline does it: every miss is a copy, none is computed."""
    return Policy(
        name="infinigen",
        digest=_digest(config),
        predictor=_predictor(config),
        missing=CopyAhead(),
        residency=ImportantPages((0,) * num_layers, enabled=False),
    )


PRESETS: dict[str, Callable[[OffloadConfig, int, RecallProfile | None], Policy]] = {
    "scout": _scout,
    "infinigen": _infinigen,
}
POLICY_NAMES = tuple(PRESETS)


def make_policy(
    config: OffloadConfig, num_layers: int, profile: RecallProfile | None = None
) -> Policy:
    """The policy that ``config`` names, for a model of ``num_layers`` layers."""
    return PRESETS[config.policy](config, num_layers, profile)
