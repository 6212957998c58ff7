"""What the engine asks of a policy: the choices in which GPU-CPU offload methods differ.

The engine queries these objects and never checks which policy it serves; ``policy/`` has the policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sglang_scout.core.forecast import PageWeights
from sglang_scout.engine import Ids, Ints
from sglang_scout.engine.digests import DigestKind
from sglang_scout.engine.stores import ModelShape, Parts, Sizes
from sglang_scout.ops.residency import HALF_LIFE_STEPS, PageUses

if TYPE_CHECKING:
    from sglang_scout.engine.ahead import QueryProjector, Selector
    from sglang_scout.engine.memory import ServerSize
    from sglang_scout.engine.step_buffers import StepInputs
    from sglang_scout.engine.transport import Transport

Route = Literal["cpu", "fetch"]
"""Missing pages are attended to on the CPU in place; or copied to the device ahead of the layer, for the real query."""


@dataclass(frozen=True)
class SelectionRule:
    """How a page is summarised and scored.

    Attributes:
        weights: the policy's trained weights, if any.
        by_head: each KV head selects its own pages, not all heads of a layer together.
        sink_pages, recent_pages: leading and newest full pages that are always selected.
        only_selected: attend to the selected pages only, not to other resident ones.
        reweigh: if digests estimate a page's mass, re-weight the predicted query's result by their estimates for the
            real query.
    """

    digest: type[DigestKind]
    weights: PageWeights | None = None
    by_head: bool = False
    sink_pages: int = 1
    recent_pages: int = 1
    only_selected: bool = True
    reweigh: bool = True

    def digest_bytes(self, shape: ModelShape) -> int:
        """Of one page, over all layers."""
        parts = self.digest.part_bytes(shape, self.weights)
        return shape.num_layers * shape.num_kv_heads * sum(parts)


@dataclass(frozen=True)
class QuerySource:
    """Which query selects a layer's pages, and attends to the missing ones on the CPU.

    One layer ahead it is W_q of layer l+1 applied to the input of layer l (ScoutAttention Algorithm 1, line 4). Layer 0
    has no previous layer: its query comes from its own input, exact but not ahead.

    Attributes:
        is_ahead: False: every layer's own query, without prediction, and the device waits.
        exact: layers that use their own query, because it is predicted poorly from the previous layer's input.
        attends: whether a predicted query may attend. If it can only select, the real query attends to missing pages.
    """

    is_ahead: bool = True
    exact: tuple[int, ...] = ()
    attends: bool = True

    def targets(self, layer: int, num_layers: int) -> tuple[int, ...]:
        """Layers whose query is predicted at the input of ``layer``; the others use the real one in their own layer."""
        if not self.is_ahead:
            return ()
        ahead = (layer + 1,) if layer + 1 < num_layers and layer + 1 not in self.exact else ()
        return (0, *ahead) if layer == 0 else ahead


@dataclass(frozen=True)
class StepReport:
    """What is known at a step boundary; all that a residency decision may depend on.

    L layers, B rows of the last step whose selections are known. Pages are (layer, page) pairs, K and V together.

    Attributes:
        step: the upcoming step.
        budget_pages: pages selected per request and layer, over all its lists.
        ages: ``[B]`` int64, steps of each row before that one.
        missed: ``[L, B]`` int64, selected pages that were not resident.
        absent: ``[L, B]`` int64, those of them still neither resident nor in flight.
        started: ``[L]`` int64, pages whose copy started at the last boundary.
        landed, used: ``[L]`` int64, pages that became resident before the last known step, and those of
            them that it selected.
        late_pages: pages whose copy started in an earlier step and is still in flight.
        spare_slots: ``[L]`` int64, free slots that are not reserved.
    """

    step: int
    budget_pages: int
    ages: Ids
    missed: Ids
    absent: Ids
    started: Ids
    landed: Ids
    used: Ids
    late_pages: int
    spare_slots: Ids


class Residency:
    """Which pages stay on the device and when missing ones are recalled. This one recalls nothing.

    Attributes:
        half_life_steps: after how many steps a selection counts half in a page's frequency.
        pin_share: share of a layer's slots whose pages, the most frequent, are evicted only by forced pages.
        patience_us: how long a step boundary waits for copies of the previous step; None: until they are done.
        spare_pages: pages that the upcoming step may prefetch before any miss, into spare slots.
    """

    half_life_steps: float = HALF_LIFE_STEPS
    pin_share: float = 0.0
    patience_us: float | None = None
    spare_pages: int = 0

    def plan(self, report: StepReport) -> None:
        """Step boundary: decide the upcoming step's recalls."""

    def pick(self, missed: Ints, ages: Ids, uses: PageUses) -> tuple[Ids, Ids]:
        """The pages that layers would like to recall, after :meth:`plan`.

        Args:
            missed: ``[L, B, k]`` pages that were not resident, -1 padded.
            ages: ``[B]`` steps of each request before that.
            uses: decayed frequency of every page of every layer.
        Returns:
            Layers and pages, distinct pairs.
        """
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def loaded_pages(self, full: int, budget_pages: int) -> int:
        """How many newest pages of a new request of ``full`` pages are resident at its first step; 0: those of the
        prompt's hint, up to the budget."""
        return full if full <= budget_pages else 0

    def reserve(self, lengths: Ids, max_new: Ids) -> int:
        """Slots of each layer to reserve for pages that requests of ``lengths`` ``[B]`` tokens will open; each may
        still generate ``max_new`` ``[B]``."""
        return 0

    def describe(self) -> dict[str, Any]:
        """State for ``/server_info``: plain numbers, strings and lists."""
        return {}


@dataclass(frozen=True)
class Policy:
    """A named set of choices. The methods are for what else a few policies need; here they change nothing."""

    name: str
    rule: SelectionRule
    query: QuerySource
    route: Route
    residency: Residency

    def describe_missing(self) -> str:
        """What happens to missing pages, for ``sglang-scout doctor``."""
        if self.route == "cpu":
            return "missing pages are attended to on the CPU"
        return "missing pages are copied to the device; the CPU computes no attention"

    def projectors(self, own: Sequence[QueryProjector]) -> Sequence[QueryProjector]:
        """What predicts each layer's query, given what does so with the model's ``own`` weights."""
        return own

    def selector(self, parts: Parts, transport: Transport, inputs: StepInputs) -> Selector | None:
        """What selects in place of :class:`LookAhead`."""
        return None

    def step_sizes(self, sizes: Sizes) -> Sizes:
        """Sizes of the buffers for a step's selections, given those of the server."""
        return sizes

    def forced_pages(self, size: ServerSize) -> int:
        """Resident pages that each request needs besides its tail."""
        return self.rule.sink_pages + self.rule.recent_pages

    def posted_pages(self, size: ServerSize) -> int:
        """Most pages of a list that the CPU attends to."""
        return size.budget_pages

    def device_bytes(self, size: ServerSize) -> int:
        """Device memory of the policy's own."""
        return 0
