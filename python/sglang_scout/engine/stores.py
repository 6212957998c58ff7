"""What the parts of the engine share: the model's shape, host pages (all KV), the resident cache, and counters.

Shapes: L layers, P host pages (page 0 is padding), S tokens a page, H KV heads, D head size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_scout.engine import Ids
from sglang_scout.engine.trace import Tracer
from sglang_scout.ops.pages import LayerPages
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.worker.arena import Arena, PageChecksums

if TYPE_CHECKING:
    from sglang_scout.engine.digests import DigestPool
    from sglang_scout.engine.policy import Policy


@dataclass(frozen=True)
class ModelShape:
    """Attention shape of one tensor-parallel rank.

    Attributes:
        dtype: of the model, and of digests that hold elements of K.
        fp8: dtype of K and V in the pages, if not the model's.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    scale: float
    fp8: torch.dtype | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.fp8 or self.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of the K (or the V) of one page in one layer."""
        return self.page_size * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize


@dataclass(frozen=True)
class Sizes:
    """Sizes of a rank's buffers.

    Attributes:
        lists: C, selection lists of a request in a layer: one, or one per KV head. Row ``r`` of a selection is list ``r
            % C`` of its request. Pages are resident for all heads either way.
    """

    budget_pages: int  # k, selected per request and layer
    num_slots: int  # of each layer on the device
    max_batch: int  # most requests in a step
    max_pages: int  # most pages of a request
    lists: int = 1


class Ranks(Protocol):
    """Tensor parallelism: the heads of a layer are on several ranks, each with its own engine, which make the same
    calls in the same order.

    A page is selected for all heads of a layer together, so the ranks all-reduce their heads' scores and select from
    the same numbers. Residency is local to each rank: it decides where its heads' part is computed, not which.
    """

    def combine(self, x: Tensor, how: str) -> Tensor:
        """Element-wise ``how``, "sum" or "max", of every rank's ``x``, which may be written into: the same bits on
        every rank."""


def context_pages(arena: Arena, shape: ModelShape) -> LayerPages | None:
    """An arena's context pages, ``[C, S, D]`` of each layer, if it has any."""
    if not arena.spec.context_pages:
        return None
    words = ([arena.context(layer, half) for layer in range(shape.num_layers)] for half in (0, 1))
    k, v = ([torch.from_numpy(x).view(shape.kv_dtype) for x in half] for half in words)
    return LayerPages.of(k, v, "cpu")


class HostPages:
    """Every KV page of every request, in host DRAM.

    Args:
        k, v: per layer ``[P * S, H, D]``, as SGLang's pool holds them, fp8 as bytes; viewed here as pages.
        context: ``[C, S, D]`` context pages of one head, if any.
    """

    def __init__(
        self,
        shape: ModelShape,
        k: Sequence[Tensor],
        v: Sequence[Tensor],
        context: LayerPages | None = None,
        checksums: PageChecksums | None = None,
    ) -> None:
        self.context, self.checksums = context, checksums
        pages = (-1, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.k = [t.view(shape.kv_dtype).view(pages) for t in k]
        self.v = [t.view(shape.kv_dtype).view(pages) for t in v]
        self._for_copies: dict[torch.device, LayerPages] = {}

    def for_copies(self, device: torch.device) -> LayerPages:
        """The pages for ops that read all layers in one launch on ``device``."""
        if device not in self._for_copies:
            self._for_copies[device] = LayerPages.of(self.k, self.v, device)
        return self._for_copies[device]

    @property
    def num_pages(self) -> int:
        return self.k[0].shape[0]

    def save(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.signedinteger]:
        """A copy of K and V of ``pages`` ``[n]``, ``[2 L, n, S, H, D]``, in newly allocated memory."""
        planes = self._planes()
        # One allocation: large enough for huge pages, and returned to the system when freed.
        saved = np.empty((len(planes), len(pages), *planes[0].shape[1:]), planes[0].dtype)
        for copy, plane in zip(saved, planes, strict=True):
            np.take(plane, pages, axis=0, out=copy, mode="clip")  # other modes copy twice
        return saved

    def restore(self, pages: npt.NDArray[np.int64], saved: npt.NDArray[np.signedinteger]) -> None:
        """Write what :meth:`save` returned to ``pages``, as many as were saved."""
        for copy, plane in zip(saved, self._planes(), strict=True):
            plane[pages] = copy

    def _planes(self) -> list[npt.NDArray[np.signedinteger]]:
        return [as_words(plane) for plane in (*self.k, *self.v)]


def as_words(pages: Tensor) -> npt.NDArray[np.signedinteger]:
    """The same memory as integers of the same size. numpy copies whole pages at memory bandwidth; torch, on the one
    thread that SGLang leaves it, takes ten times as long."""
    return pages.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[pages.element_size()]).numpy()


class ResidentCache:
    """Device copies of the important pages: ``k``, ``v`` ``[L, slots, S, H, D]``."""

    def __init__(self, shape: ModelShape, num_slots: int, device: torch.device | str) -> None:
        size = shape.num_layers, num_slots, shape.page_size, shape.num_kv_heads, shape.head_dim
        self.k, self.v = (torch.zeros(size, dtype=shape.kv_dtype, device=device) for _ in "kv")

    def as_layers(self) -> LayerPages:
        """The slots for ops over all layers."""
        return LayerPages.of(self.k.unbind(), self.v.unbind(), self.k.device)


class Stat(NamedTuple):
    """What ``/metrics`` and the documents say of a number. ``kind``: counter, gauge or histogram."""

    kind: str
    unit: str
    help: str


def _total(unit: str, help: str) -> Any:
    return field(default=0, metadata={"stat": Stat("counter", unit, help)})


@dataclass
class Counters:
    """Totals since start; those without help are in ``/server_info`` only. The CPU compute ratio follows the paper's
    Figure 6: pages computed on the CPU over the budget, mean over requests, layers and steps."""

    num_layers: InitVar[int]
    steps: int = _total("steps", "Decode steps")
    dense_steps: int = _total(
        "steps", "Steps with full attention: all pages resident, few beyond the budget"
    )
    selected_pages: int = _total("pages", "Selected, summed over requests, layers and steps")
    cpu_pages: int = _total("pages", "Computed by CPU attention because they were not resident")
    fetched_pages: int = _total("pages", "Copied to the device before the layer that selected them")
    budget_pages: int = _total("pages", "The budget, summed over requests, layers and steps")
    recalled_pages: int = _total("pages", "Copied to the device by recalls")
    recall_bytes: int = _total("bytes", "Copied to the device by recalls")
    warmed_pages: int = 0
    recall_wait_us: int = 0
    gpu_wait_us: int = 0
    verify_checks: int = 0
    verify_max_rel_error: float = 0.0
    verify_unequal_selections: int = 0
    cpu_pages_by_layer: Ids = field(init=False)
    gpu_wait_us_by_layer: Ids = field(init=False)
    query_cosine_by_layer: npt.NDArray[np.float32] = field(init=False)  # last measured; NaN: never
    observed: deque[tuple[str, float]] = field(init=False)  # for histograms, until they are read

    def __post_init__(self, num_layers: int) -> None:
        self.cpu_pages_by_layer, self.gpu_wait_us_by_layer = np.zeros((2, num_layers), np.int64)
        self.query_cosine_by_layer = np.full(num_layers, np.nan, np.float32)
        self.observed = deque(maxlen=2**14)

    def observe(self, **seconds: float) -> None:
        self.observed.extend(seconds.items())

    def totals(self) -> dict[str, float]:
        return {x.name: getattr(self, x.name) for x in fields(self) if x.init}

    @property
    def cpu_compute_ratio(self) -> float:
        return self.cpu_pages / self.budget_pages if self.budget_pages else 0.0

    def count_step(
        self, selected: int, missing: Ids, budget: int, route: str, waits_us: Ids | int = 0
    ) -> None:
        """A step's selections: pages selected over all layers, ``missing`` ``[L]`` of them, ``budget`` of a layer; and
        how long its layers ``[L]`` waited for the CPU's results."""
        self.selected_pages += selected
        self.budget_pages += budget * len(missing)
        if route == "cpu":
            self.cpu_pages += int(missing.sum())
            self.cpu_pages_by_layer += missing
        else:
            self.fetched_pages += int(missing.sum())
        self.gpu_wait_us += int(np.sum(waits_us))
        self.gpu_wait_us_by_layer += waits_us


class Parts:
    """The stores of one rank, its policy, counters and timeline.

    Args:
        host: pages that the attention process maps too; the device can access them.
        digests: of the host pages, on the device of the steps.
        ranks: those that share a layer's heads; None: all heads are here.

    Attributes:
        device: of the steps.
        resident, table: the resident cache, and which page is in which slot of it.
    """

    def __init__(
        self,
        policy: Policy,
        shape: ModelShape,
        sizes: Sizes,
        host: HostPages,
        digests: DigestPool,
        tracer: Tracer | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.policy, self.shape, self.sizes = policy, shape, policy.step_sizes(sizes)
        self.host, self.digests, self.ranks = host, digests, ranks
        self.tracer = tracer or Tracer(None, 0)
        self.counters = Counters(shape.num_layers)
        self.resident = ResidentCache(shape, sizes.num_slots, digests.device)
        self.device: torch.device = self.resident.k.device  # with its index
        counts = shape.num_layers, host.num_pages, sizes.num_slots
        self.table = ResidencyTable(*counts, policy.residency.half_life_steps)
