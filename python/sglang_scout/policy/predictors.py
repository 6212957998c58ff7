"""Predictor axis: the next layer's query from this layer's input, or the real query."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NextLayerQuery:
    """One layer ahead: W_q of layer l+1 applied to the input of layer l (paper Algorithm 1, line 4).

    Layer 0 has no layer before it: its query comes from its own input, exact but without lead. The
    layers named in ``exact`` have no lead either: they use the real query, for models in which a
    layer changes its input so much that the next one's query cannot be told from it.

    A request comes without a page on the device, so in its first step all that it selects would be
    attended to with predicted queries alone, when its answer begins. The paper starts from the blocks
    found important after prefill; here, a request younger than ``exact_steps`` uses its real queries,
    which costs a step with such a request a wait in each layer.
    """

    lead: int = 1
    exact: tuple[int, ...] = ()
    exact_steps: int = 1

    def targets(self, layer: int, num_layers: int) -> tuple[int, ...]:
        ahead = (layer + 1,) if layer + 1 < num_layers and layer + 1 not in self.exact else ()
        return (0, *ahead) if layer == 0 else ahead


@dataclass(frozen=True)
class CurrentQuery:
    """The layer's real query: nothing is predicted and the device waits (ablation without pre-computation)."""

    lead: int = 0
    exact_steps: int = 0

    def targets(self, layer: int, num_layers: int) -> tuple[int, ...]:
        return ()
