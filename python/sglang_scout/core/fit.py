"""Fits a :class:`StreamCorrection` to layer inputs that a server kept while it decoded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_scout.core.correction import StreamCorrection, read_arrays
from sglang_scout.core.errors import ConfigError

INPUTS_VERSION = 1
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Strengths that are tried, in units of the features' mean square, which is 1."""
HELD_OUT_SHARE = 0.2
LEAST_TOKENS = 100
_EPS = 1e-12

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerFit:
    """How the map of one layer came out, on tokens that it was not fitted on.

    ``error`` and ``plain_error`` are means of |predicted - real|^2 / |real|^2 of the next layer's input,
    with the map and without one. Where the map does not help, it is zero and ``ridge`` is None.
    """

    layer: int
    ridge: float | None
    error: float
    plain_error: float


def read_inputs(path: str) -> tuple[dict[str, object], Floats, npt.NDArray[np.int64]]:
    """What ``quality_inputs`` wrote: header, inputs ``[N, L, C]``, source ``[N]``.

    Raises:
        ConfigError: no such file, or of another version.
    """
    about, arrays = read_arrays(path, "layer inputs")
    if about.get("version") != INPUTS_VERSION or not {"inputs", "source"} <= set(arrays):
        raise ConfigError(f"layer inputs = {path!r}: not a file of this version; record it anew")
    return about, arrays["inputs"], arrays["source"]


def fit_correction(
    inputs: Floats,
    source: npt.NDArray[np.int64],
    *,
    rank: int,
    model: str = "",
    weights: str = "",
) -> tuple[StreamCorrection, list[LayerFit]]:
    """The low-rank maps that predict best, in least squares, how layer inputs change.

    With x, y the inputs of a layer and of the next one, p that of the next one at the previous token, and
    |.| the root mean square: (y - x) / |x| from x / |x| and p / |p|, by ridge regression; of that the
    ``rank`` directions with most of the fitted variance (reduced-rank regression). Tokens are weighted by
    (|x| / |y|)^2: a query is computed from y / |y|, so what counts is the error relative to |y|. The ridge
    is the one of ``RIDGES`` that is best on the last fifth of the tokens.

    Args:
        inputs: ``[N, L, C]`` layer inputs of decoded tokens.
        source: ``[N]`` place of the same request's previous token, -1 if it is not there.
        rank: of each map; less where there are fewer tokens.
        model, weights: of the model, for the file.
    Raises:
        ConfigError: fewer than 100 tokens with a previous one.
    """
    rows = np.flatnonzero(source >= 0)
    if len(rows) < LEAST_TOKENS:
        raise ConfigError(
            f"quality_inputs: {len(rows)} tokens follow another one of their request; a fit needs "
            f"{LEAST_TOKENS}, better some thousand"
        )
    C = inputs.shape[2]
    rank = min(rank, C, len(rows))
    now, previous, out, bias, fits = [], [], [], [], []
    for layer in range(inputs.shape[1] - 1):
        last = inputs[source[rows], layer + 1]
        maps, mean, fit = _fit_layer(inputs[rows, layer], inputs[rows, layer + 1], last, rank)
        fits.append(LayerFit(layer, *fit))
        now.append(maps[0][:C])
        previous.append(maps[0][C:])
        out.append(maps[1])
        bias.append(mean)
    correction = StreamCorrection(
        model=model,
        weights=weights,
        tokens=len(rows),
        **{
            name: np.stack(arrays).astype(np.float32)
            for name, arrays in (
                ("now", now), ("previous", previous), ("out", out), ("bias", bias)
            )
        },
    )  # fmt: skip
    return correction, fits


def _fit_layer(
    x: Floats, y: Floats, last: Floats, rank: int
) -> tuple[tuple[Floats, Floats], Floats, tuple[float | None, float, float]]:
    """``(features -> rank, rank -> C), bias, (ridge, error, plain error)`` of one layer."""
    size = _rms(x)
    features = np.concatenate([x / size, last / _rms(last)], axis=1)
    change = (y - x) / size
    weight = np.square(size / _rms(y))
    held = max(1, int(len(x) * HELD_OUT_SHARE))
    plain = _error(change[-held:], weight[-held:])
    best: tuple[float | None, float] = (None, plain)
    for ridge in RIDGES:
        down, up, bias = _solve(features[:-held], change[:-held], weight[:-held], ridge, rank)
        error = _error(features[-held:] @ down @ up + bias - change[-held:], weight[-held:])
        if error < best[1]:
            best = (ridge, error)
    if best[0] is None:
        C = x.shape[1]
        zeros = np.zeros((2 * C, rank), np.float32), np.zeros((rank, C), np.float32)
        return zeros, np.zeros(C, np.float32), (None, plain, plain)
    down, up, bias = _solve(features, change, weight, best[0], rank)
    return (down, up), bias, (best[0], best[1], plain)


def _error(residual: Floats, weight: Floats) -> float:
    return float((weight * np.square(residual)).mean())


def _solve(
    f: Floats, r: Floats, weight: Floats, ridge: float, rank: int
) -> tuple[Floats, Floats, Floats]:
    """Reduced-rank ridge regression with a free mean: ``r ~ f @ down @ up + bias``; weight ``[n, 1]``."""
    share = weight.astype(np.float64) / weight.mean(dtype=np.float64)
    f_mean, r_mean = (share * f).mean(0), (share * r).mean(0)
    f64, r64 = np.sqrt(share) * (f - f_mean), np.sqrt(share) * (r - r_mean)
    n, width = f64.shape
    if n <= width:  # then the same from the smaller, dual system
        b = f64.T @ np.linalg.solve(f64 @ f64.T + ridge * n * np.eye(n), r64)
    else:
        b = np.linalg.solve(f64.T @ f64 + ridge * n * np.eye(width), f64.T @ r64)
    fitted = f64 @ b
    _, vectors = np.linalg.eigh(fitted.T @ fitted)  # ascending
    up = vectors[:, ::-1][:, :rank].T
    down = b @ up.T
    bias = r_mean - f_mean @ down @ up
    return down.astype(np.float32), up.astype(np.float32), bias.astype(np.float32)


def _rms(x: Floats) -> Floats:
    rms: Floats = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + _EPS)
    return rms
