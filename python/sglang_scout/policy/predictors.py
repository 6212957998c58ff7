"""Predictor axis: the next layer's query from this layer's input, or the real query."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NextLayerQuery:
    """One layer ahead: W_q of layer l+1 applied to the input of layer l (paper Algorithm 1, line 4).

    Layer 0 has no layer before it: its query comes from its own input, exact but without lead.
    """

    lead: int = 1

    def targets(self, layer: int, num_layers: int) -> tuple[int, ...]:
        ahead = (layer + 1,) if layer + 1 < num_layers else ()
        return (0, *ahead) if layer == 0 else ahead


@dataclass(frozen=True)
class CurrentQuery:
    """The layer's real query: nothing is predicted and the device waits (ablation without pre-computation)."""

    lead: int = 0

    def targets(self, layer: int, num_layers: int) -> tuple[int, ...]:
        return ()
