"""Queries ahead of their layer, and the layer inputs that they are predicted from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.ops.advance import Correction, advance_input
from sglang_scout.policy.axes import PredictorAxis

QueryProjector = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer input ``[B, hidden]``, positions ``[B]``) -> query after RoPE, ``[B, HQ, D]`` fp32."""


class LayerInputs:
    """The layer inputs of the running step, and those of every request's previous token.

    Attributes:
        source: ``[B]`` row that each request had in the step before; -1: it was not in it.
        known: ``[B]`` bool tensor, ``source >= 0``.
    """

    def __init__(self) -> None:
        self._now: dict[int, torch.Tensor] = {}
        self._last: dict[int, torch.Tensor] = {}
        self._slots: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.source = np.zeros(0, np.int64)
        self.known = torch.zeros(0, dtype=torch.bool)

    def begin_step(
        self, request_slots: npt.NDArray[np.int64], fresh: npt.NDArray[np.bool_]
    ) -> None:
        """A step begins with these rows. A slot's new owner (``fresh``) has no previous token."""
        rows = {int(slot): row for row, slot in enumerate(self._slots)}
        source = np.array([rows.get(int(slot), -1) for slot in request_slots], np.int64)
        self.source = np.where(fresh, -1, source)
        self.known = torch.from_numpy(self.source >= 0)
        self._slots = np.array(request_slots, np.int64)
        self._last, self._now = self._now, {}

    def see(self, layer: int, x: torch.Tensor) -> None:
        """``x`` ``[B, hidden]`` is the input of ``layer``. Kept as a copy: SGLang adds in place."""
        self._now[layer] = x.clone()

    def now(self, layer: int) -> torch.Tensor:
        return self._now[layer]

    def previous(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        """``[B, hidden]`` of each request's previous token; anything where it is not known."""
        last = self._last.get(layer)
        if last is None:
            return torch.zeros_like(like)
        rows = torch.from_numpy(self.source.clip(0)).to(last.device)
        return last.index_select(0, rows)


class DeviceLayerInputs:
    """The same in buffers that stay where they are, for steps that are captured.

    A layer's input may be noted only after all predictions that need the previous token's.

    Args:
        layers, hidden_size, dtype: of the inputs.
        source: ``[max_batch]`` int32 on the device, which holds for each step the row of its requests
            in the step before, -1: none. Steps are captured before there is one, with what lies there.
    """

    def __init__(
        self, layers: int, hidden_size: int, dtype: torch.dtype, source: torch.Tensor
    ) -> None:
        shape = layers, len(source), hidden_size
        self._last = torch.zeros(shape, dtype=dtype, device=source.device)
        self._source = source

    @property
    def known(self) -> torch.Tensor:
        return self._source >= 0

    def see(self, layer: int, x: torch.Tensor) -> None:
        """``x`` ``[B, hidden]`` is the input of ``layer``."""
        self._last[layer, : len(x)].copy_(x)

    def previous(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        """``[B, hidden]`` of each request's previous token; anything where it is not known."""
        return self._last[layer].index_select(0, self._source[: len(like)].clamp(min=0))


class PreviousInputs(Protocol):
    """What predictions read of the layer inputs."""

    @property
    def known(self) -> torch.Tensor: ...

    def previous(self, layer: int, like: torch.Tensor) -> torch.Tensor: ...


class Forecast:
    """Predicts queries as a predictor axis says.

    Args:
        predictor: the choice.
        projectors: per layer, its query from a layer input.
        inputs: of the steps; only read.
        device: where they are.
    """

    def __init__(
        self,
        predictor: PredictorAxis,
        projectors: Sequence[QueryProjector],
        inputs: PreviousInputs,
        device: torch.device | str = "cpu",
    ) -> None:
        self._projectors = projectors
        self._inputs = inputs
        self._carry = predictor.carry
        self._corrections: list[Correction] = []
        if predictor.correction is not None:
            arrays = predictor.correction
            self._corrections = [
                Correction(*(torch.from_numpy(part).to(device) for part in layer))
                for layer in zip(arrays.now, arrays.previous, arrays.out, arrays.bias, strict=True)
            ]

    @property
    def needs_previous(self) -> bool:
        """Whether :class:`LayerInputs` must follow the steps."""
        return bool(self._carry or self._corrections)

    def query(
        self, layer: int, target: int, x: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The query of layer ``target`` from the input ``x`` of ``layer``; exact where they are one.

        Args:
            x: ``[B, hidden]``.
            positions: ``[B]`` int64.
        Returns:
            ``[B, HQ, D]`` fp32 after RoPE.
        """
        if target != layer and self.needs_previous:
            x = advance_input(
                x,
                self._inputs.previous(layer, x),
                self._inputs.previous(target, x),
                self._inputs.known[: len(x)],
                self._carry,
                self._corrections[layer] if self._corrections else None,
            )
        return self._projectors[target](x, positions)
