"""Checks once, in the first steps of a server, that queries are predicted from the layers' real input.

SGLang passes a layer its input in parts, which differ between releases. A prediction that lacks one looks like a valid
query, and selects the wrong pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_scout.ops.predict import QueryProjector

MAX_ERROR = 0.1
"""Relative, over all queries of a layer. Rounding causes up to 0.01, omitting the residual stream about 1."""


class UnexpectedQueryError(RuntimeError):
    """SGLang's query differs from the predicted one, or none was seen."""


class QueryProbe:
    """Compares each layer's query with its projector's output for the layer's own input.

    Args:
        projectors: of the model's weights, by layer.
    """

    def __init__(self, projectors: Sequence[QueryProjector]) -> None:
        self._projectors = dict(enumerate(projectors))
        self._predicted: torch.Tensor | None = None

    @property
    def unseen(self) -> list[int]:
        """Layers whose query has not been compared yet."""
        return list(self._projectors)

    def layer_input(
        self, layer: int, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> None:
        """As of ``StepEngine.layer_input``."""
        projector = self._projectors.get(layer)
        if projector is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._predicted = projector.finish(projector.start(x, residual), positions)

    def query(self, layer: int, q: torch.Tensor) -> None:
        """The layer's real query ``[B, HQ, D]``.

        Raises:
            UnexpectedQueryError: it differs.
        """
        predicted, self._predicted = self._predicted, None
        if predicted is None:
            return
        finite = q.isfinite().flatten(1).all(1)
        wanted, found = q[finite].float(), predicted[finite].float()
        if not len(wanted):
            return  # KV that was never written
        if not (found - wanted).norm() <= MAX_ERROR * wanted.norm():
            raise UnexpectedQueryError(
                f"--kv-offload: the query of layer {layer} differs from the one predicted from its own input: this "
                "SGLang does not pass layers what sglang-scout expects, and pages would be selected with wrong queries"
                "; install SGLang unmodified, or serve without --kv-offload"
            )
        del self._projectors[layer]
