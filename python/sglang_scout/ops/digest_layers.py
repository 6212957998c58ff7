"""Digests of the same pages in all layers: `build_digests` and `build_signs` as one launch each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.registry import Implementation, Op
from . import native, native_signs, triton
from .digest import TOLERANCES as DIGEST_TOLERANCES
from .digest import build_digests_reference
from .gather import LayerPages
from .shapes import Shapes
from .signs import PAGE_TOKENS, build_signs_reference
from .signs import TOLERANCES as SIGN_TOLERANCES

_Build = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]


def _layer_by_layer(build: _Build) -> Callable[..., None]:
    def run(source: LayerPages, ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        for layer, k in enumerate(source.k):
            build(k, ids, low[layer], high[layer])

    return run


def _native(of_one: Implementation) -> Implementation:
    def reasons(
        source: LayerPages, ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> list[str]:
        return of_one.reasons(source.k[0], ids, low, high)

    return Implementation("native", _layer_by_layer(of_one.run), reasons)


def _check(name: str, **sizes: int) -> Callable[..., None]:
    def check(source: LayerPages, ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        shapes = Shapes(name, L=len(source.k), **sizes)
        shapes.bind("k", source.k[0], "PSHD")
        shapes.bind("ids", ids, "n", torch.int64)
        shapes.bind("low", low, "LPHD", source.k[0].dtype)
        shapes.bind("high", high, "LPHD", source.k[0].dtype)

    return check


BUILD_LAYER_DIGESTS = Op(
    "build_layer_digests",
    _layer_by_layer(build_digests_reference),
    [_native(native.BUILD_DIGESTS), triton.BUILD_LAYER_DIGESTS],
    check=_check("build_layer_digests"),
    tolerances=DIGEST_TOLERANCES,
)
BUILD_LAYER_SIGNS = Op(
    "build_layer_signs",
    _layer_by_layer(build_signs_reference),
    [_native(native_signs.BUILD_SIGNS), triton.BUILD_LAYER_SIGNS],
    check=_check("build_layer_signs", S=PAGE_TOKENS),
    tolerances=SIGN_TOLERANCES,
)


def build_layer_digests(
    source: LayerPages,
    ids: torch.Tensor,
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    impl: str = "auto",
) -> None:
    """`build_digests` of pages ``ids`` in every layer.

    Args:
        source: K of each layer, [P, S, H, D]; the named pages are full.
        ids: [n] int64 in [0, P); n may be 0.
        kmin, kmax: [L, P, H, D] dtype of K; mutated.
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    Source: Quest section 3.3, ScoutAttention section 3.2.
    """
    BUILD_LAYER_DIGESTS(source, ids, kmin, kmax, impl=impl)


def build_layer_signs(
    source: LayerPages,
    ids: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    impl: str = "auto",
) -> None:
    """`build_signs` of pages ``ids`` in every layer; arguments as of `build_layer_digests`."""
    BUILD_LAYER_SIGNS(source, ids, low, high, impl=impl)
