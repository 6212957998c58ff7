"""Named policies. A new one is a row here; the engine does not change."""

from __future__ import annotations

from collections.abc import Callable

from sglang_scout.core.config import DEFAULT_RECALL_THRESHOLD, OffloadConfig
from sglang_scout.core.parse_config import check_layers
from sglang_scout.core.profile import RecallProfile
from sglang_scout.policy.axes import Policy, PredictorAxis, ResidencyAxis
from sglang_scout.policy.digests import PageDigest
from sglang_scout.policy.missing import CopyAhead, CpuAttention
from sglang_scout.policy.predictors import CurrentQuery, NextLayerQuery
from sglang_scout.policy.recall_controller import RecallController
from sglang_scout.policy.residency import ImportantPages, MeasuredRecall


def _digest(config: OffloadConfig) -> PageDigest:
    return PageDigest(
        form=config.digest,
        head_reduce=config.head_reduce,
        sink_pages=config.sink_pages,
        recent_pages=config.recent_pages,
        resident_bonus=config.resident_bonus,
        only_selected=config.attend == "selected",
    )


def _predictor(config: OffloadConfig) -> PredictorAxis:
    if not config.precompute:
        return CurrentQuery()
    return NextLayerQuery(exact=config.exact_layers, exact_steps=config.exact_steps)


def _residency(
    config: OffloadConfig,
    num_layers: int,
    page_bytes: int,
    profile: RecallProfile | None,
    predictor: PredictorAxis,
) -> ResidencyAxis:
    from_profile = profile is not None and config.recall in ("profile", "adaptive")
    intervals = (
        tuple(profile.intervals)
        if profile is not None and from_profile
        else (config.recall_interval,) * num_layers
    )
    if config.recall != "adaptive":
        return ImportantPages(intervals, enabled=config.recall != "off")
    threshold = config.recall_threshold
    if threshold is None:
        threshold = profile.threshold if profile is not None else DEFAULT_RECALL_THRESHOLD
    # Of a layer without lead every page on the CPU is waited for.
    ahead = {
        layer
        for at in range(num_layers)
        for layer in predictor.targets(at, num_layers)
        if layer > at
    }
    eager = [layer for layer in range(num_layers) if predictor.lead and layer not in ahead]
    controller = RecallController(
        intervals=intervals,
        threshold=threshold,
        step_pages=max(1, int(config.recall_step_mib * 2**20) // page_bytes),
        eager_layers=eager,
    )
    return MeasuredRecall(controller)


def _scout(
    config: OffloadConfig,
    num_layers: int,
    page_bytes: int,
    profile: RecallProfile | None,
) -> Policy:
    predictor = _predictor(config)
    return Policy(
        name="scout",
        digest=_digest(config),
        predictor=predictor,
        missing=CpuAttention(),
        residency=_residency(config, num_layers, page_bytes, profile, predictor),
    )


def _infinigen(
    config: OffloadConfig,
    num_layers: int,
    page_bytes: int,
    profile: RecallProfile | None,
) -> Policy:
    """Recall-based offload as the paper's baseline does it: every miss is a copy, none is computed."""
    return Policy(
        name="infinigen",
        digest=_digest(config),
        predictor=_predictor(config),
        missing=CopyAhead(),
        residency=ImportantPages((0,) * num_layers, enabled=False),
    )


_Preset = Callable[[OffloadConfig, int, int, RecallProfile | None], Policy]
PRESETS: dict[str, _Preset] = {
    "scout": _scout,
    "infinigen": _infinigen,
}
POLICY_NAMES = tuple(PRESETS)
COPY_AHEAD_POLICIES = ("infinigen",)
"""Those that copy within a step, which a step without the host cannot do."""


def make_policy(
    config: OffloadConfig,
    num_layers: int,
    page_bytes: int,
    profile: RecallProfile | None = None,
) -> Policy:
    """The policy that ``config`` names.

    Args:
        num_layers: of the model.
        page_bytes: K and V of one page in one layer, what one recalled page costs on the link.
        profile: of this model, or None.

    Raises:
        ConfigError: a layer is named that the model does not have.
    """
    check_layers(config, num_layers)
    return PRESETS[config.policy](config, num_layers, page_bytes, profile)
