"""Predicted queries on the decode server: the learned correction, and the record of their quality."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.correction import StreamCorrection, load_correction
from sglang_scout.core.errors import ConfigError
from sglang_scout.engine.forecast import Forecast, QueryProjector
from sglang_scout.engine.quality import QualityRecorder
from sglang_scout.engine.step import StepEngine
from sglang_scout.plugin.support import weights_fingerprint
from sglang_scout.policy.presets import predictors


def learned_correction(
    config: OffloadConfig, layers: list[torch.nn.Module], model_path: str
) -> StreamCorrection | None:
    """The correction that ``predictor_file`` names, checked against the loaded model.

    Raises:
        ConfigError: as of `load_correction`.
    """
    if config.predictor_file is None:
        return None
    return load_correction(
        config.predictor_file,
        num_layers=len(layers),
        hidden_size=layers[0].input_layernorm.weight.shape[0],  # type: ignore[union-attr,index]
        model=model_path,
        weights=weights_fingerprint(layers),
    )


def make_quality(
    config: OffloadConfig,
    engine: StepEngine,
    projectors: Sequence[QueryProjector],
    correction: StreamCorrection | None,
    layers: list[torch.nn.Module],
    model_path: str,
) -> QualityRecorder | None:
    """The recorder that ``quality`` asks for; it compares all predictors that there are.

    Raises:
        ConfigError: the file cannot be written.
    """
    if config.quality is None:
        return None
    forecasts = {
        name: Forecast(predictor, projectors, engine.inputs)
        for name, predictor in predictors(correction).items()
    }
    try:
        return QualityRecorder(
            config.quality,
            shape=engine.shape,
            digest=engine.policy.digest,
            host=engine.host,
            digests=engine.digests,
            forecasts=forecasts,
            inputs=engine.inputs,
            keep_tokens=config.quality_inputs,
            model=Path(model_path).name,
            weights=weights_fingerprint(layers),
            ranks=engine.ranks,
        )
    except OSError as error:
        raise ConfigError(
            f"--kv-offload-config: quality = {config.quality!r}: cannot write it: {error.strerror}"
        ) from error
