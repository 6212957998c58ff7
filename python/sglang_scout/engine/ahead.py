"""Look-ahead: which pages the device and the CPU attend to in each layer (Algorithm 1, lines 4 to 7).

At the input of layer l the query of layer l+1 is predicted: the residual stream changes little from one layer to the
next, so the next layer's norm, projection, head norm and RoPE of this input approximate it. Its important pages are
selected, and those not resident posted at once. What came of it waits in one :class:`Ahead` until layer l+1 merges it.
This runs on a side stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_scout.engine.device import ForkedStream
from sglang_scout.engine.requests import Batch
from sglang_scout.engine.step_buffers import StepInputs, StepResults, of_lists
from sglang_scout.engine.stores import Parts
from sglang_scout.engine.trace import DeviceClock, Tracer
from sglang_scout.engine.transport import Transport
from sglang_scout.engine.verify import Verifier
from sglang_scout.ops.predict import add_norm, rotate_heads
from sglang_scout.ops.select import select_pages


@dataclass(frozen=True)
class QueryHeads:
    """How a layer makes its query of the projection's output: head norm and RoPE; see :func:`rotate_heads`."""

    num_heads: int
    head_dim: int
    rotary_dim: int
    is_neox: bool
    cos_sin: Callable[[], Tensor]  # the table, which SGLang replaces by one of another dtype
    norm_weight: Tensor | None = None  # RMSNorm per head, or None
    norm_eps: float = 0.0


@dataclass(frozen=True)
class QueryProjector:
    """A layer's query from any layer's input, in two parts.

    Attributes:
        quantized: the layer's own projection, in place of ``w_q``: normed input -> (q, k, v side by side, and a bias
            that it has not added or None).
    """

    norm_weight: Tensor  # of the RMSNorm before the projection
    norm_eps: float
    heads: QueryHeads
    w_q: Tensor | None = None  # [HQ * D, hidden]
    b_q: Tensor | None = None
    quantized: Callable[[Tensor], tuple[Tensor, Tensor | None]] | None = None
    weight_bytes: int = 0

    def start(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """``[B, ...]`` newly allocated, from a layer input ``x`` ``[B, hidden]`` and a residual to add to it or None.

        Runs on the model's stream, as the model overwrites the layer input afterwards. A quantised projection too, K
        and V included, 1 + 2 H / HQ times the work: such GEMMs may share a workspace.
        """
        residual = None if residual is None else residual.contiguous()  # as kernels assume
        normed = add_norm(x.contiguous(), residual, self.norm_weight, self.norm_eps)
        if self.quantized is None:
            return normed
        q_size = self.heads.num_heads * self.heads.head_dim
        qkv, bias = self.quantized(normed)
        return qkv[:, :q_size] if bias is None else qkv[:, :q_size] + bias[:q_size]

    def finish(self, started: Tensor, positions: Tensor) -> Tensor:
        """``[B, HQ, D]`` query after RoPE, of the model's dtype, at ``positions`` ``[B]``. May run on a side stream."""
        q, of = started, self.heads
        if self.w_q is not None:
            q = torch.nn.functional.linear(started, self.w_q, self.b_q)
        norm = of.norm_weight, of.norm_eps
        sizes = of.rotary_dim, of.is_neox, of.num_heads, of.head_dim
        return rotate_heads(q, *norm, of.cos_sin(), positions, *sizes)


@dataclass
class Ahead:
    """One layer's selection, from look-ahead to merge; B requests of C lists."""

    query: Tensor  # [B, HQ, D] attends to the missing pages: the predicted one, or the real one
    pages: Tensor  # [B * C, N], or [B, N] for all lists; the device attends to resident ones
    n_pages: Tensor | None  # how many each row of these has; None: -1 padded
    missing: Tensor  # [B * C, k] selected pages that are not resident, for the CPU
    n_missing: Tensor  # [B * C] how many
    ticket: Any = None  # of the transport


class Selector:
    """What the engine asks about each layer of a step. One that selects nothing ahead has only :meth:`take`.

    Attributes:
        dense_pages: most pages beyond its budget that a batch may have for a step with full attention over resident
            pages; None: there are no such steps.
        context_pages: used, and total, over all layers: pages of tokens that single heads keep.
    """

    dense_pages: int | None = None
    context_pages: tuple[int, int] = (0, 0)

    def pause(self) -> None:
        """Launches until the next step belong to no request."""

    def begin(self, batch: Batch) -> Batch:
        """Step boundary: the batch with the pages that the device may attend to."""
        return batch

    def layer_input(
        self, layer: int, x: Tensor, residual: Tensor | None, positions: Tensor
    ) -> None:
        """As :meth:`StepEngine.layer_input`, of steps that are not dense."""

    def take(self, layer: int, query: Tensor) -> Ahead:
        """What the layer, with this real ``query`` ``[B, HQ, D]``, attends to; posted."""
        raise NotImplementedError

    def attended(self, layer: int, query: Tensor, lse: Tensor, *window: Tensor) -> None:
        """The device attended to resident pages, with ``lse`` ``[B, HQ]``; ``window``: K of the slots, pages,
        ``slot_of``, tail slots and tail lengths."""

    def close(self) -> None:
        """No step follows."""


class LookAhead(Selector):
    """Selects pages by their digests, one layer ahead where the policy's query can be predicted."""

    def __init__(
        self,
        parts: Parts,
        transport: Transport,
        inputs: StepInputs,
        results: StepResults,
        projectors: Sequence[QueryProjector],
        verifier: Verifier | None,
        clock: Tracer | DeviceClock,
    ) -> None:
        self._parts, self._rule, self._query = parts, parts.policy.rule, parts.policy.query
        self._transport, self._inputs, self._results = transport, inputs, results
        self._projectors, self._verifier, self._clock = projectors, verifier, clock
        # With a list per KV head each selects for itself, even if a rank has only one.
        self._ranks = None if self._rule.by_head else parts.ranks
        # Collectives need order.
        self._beside = ForkedStream(parts.device if self._ranks is None else None)
        self._posts_late = parts.policy.route == "cpu" and not self._query.attends
        self._ahead: list[Ahead | None] = [None] * parts.shape.num_layers
        # Ranks may differ in residency, and would then replay different graphs.
        if parts.ranks is None:
            predicts = self._query.targets(0, 2)
            read_bytes = max((p.weight_bytes for p in projectors), default=0) if predicts else 0
            self.dense_pages = read_bytes // (2 * parts.shape.page_bytes)

    def begin(self, batch: Batch) -> Batch:
        self._beside.join()
        self._ahead = [None] * len(self._ahead)
        return batch

    def layer_input(
        self, layer: int, x: Tensor, residual: Tensor | None, positions: Tensor
    ) -> None:
        for target in self._query.targets(layer, len(self._ahead)):
            projector = self._projectors[target]
            started = projector.start(x, residual)
            with self._beside.fork(target, started, positions):
                with self._clock.slice("ahead", "predict", layer=target):
                    query = projector.finish(started, positions)
                self._ahead[target] = self._select(target, query)

    def _select(self, layer: int, query: Tensor) -> Ahead:
        """Select the pages of a layer, and post the missing ones."""
        rule, candidates = self._rule, self._inputs.candidates.first(len(query))
        sizes, scale = self._parts.sizes, self._parts.shape.scale
        by_list = of_lists(query, sizes.lists)
        with self._clock.slice("ahead", "score", layer=layer):
            scores = self._parts.digests.score(layer, by_list, candidates, scale)
            if self._ranks is not None:
                # Softmax shares are per head over its pages, so they can be summed over any heads.
                scores = self._ranks.combine(scores, "sum")
        with self._clock.slice("ahead", "select", layer=layer):
            tables = candidates.list_table, candidates.list_n_full, self._inputs.slot_of[layer]
            forced = rule.sink_pages, rule.recent_pages
            out = self._results.of(layer, len(by_list))
            selection = select_pages(scores, *tables, sizes.budget_pages, *forced, out)
        if self._verifier is not None:
            self._verifier.check_selection(selection.pages)
        attended = (selection.pages, None) if rule.only_selected else candidates[:2]
        ahead = Ahead(query, *attended, selection.missing, selection.n_missing)
        if not self._posts_late:
            self._post(layer, ahead)
        return ahead

    def _post(self, layer: int, ahead: Ahead) -> None:
        query = ahead.query.contiguous()
        ahead.ticket = self._transport.post(layer, query, ahead.missing, ahead.n_missing)

    def take(self, layer: int, query: Tensor) -> Ahead:
        ahead, self._ahead[layer] = self._ahead[layer], None
        if ahead is None:  # not computed ahead
            self._beside.join()  # the ring needs posts in single-stream order
            ahead = self._select(layer, query)
        self._beside.join(layer)
        if not self._query.attends:
            ahead.query = query
        if self._posts_late:
            self._post(layer, ahead)
        return ahead
