"""What cases of kernels share: pages and digests, how a result is compared with the reference, and `Case` itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmark.kernels.tolerances import Tolerance, tolerance_of
from sglang_scout.ops import rotated
from sglang_scout.ops.pages import LayerPages

PILOT_RANK = 32
S, G, D = 32, 5, 128  # Qwen3-14B, which has 8 KV heads
REPEATS = 8
DTYPE, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
DIGESTS = 8  # per page with K and V
LAYER_PAGES = 512  # at most: what the host has of a layer is page-locked by each process
ROUNDED = Tolerance(2**-8, 2**-8, "result or softmax weights rounded to bfloat16")


@dataclass(frozen=True)
class Op:
    """The function that launches a kernel, and the reference for it."""

    kernel: Callable[..., Any]
    reference: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.reference, DTYPE)


@dataclass
class Case:
    """One kernel at one size.

    Attributes:
        sizes: fields of its row.
        bytes_moved: by one call.
        calls: equivalent calls on different data, to be timed.
        check: the difference from the reference, "" if none.
        resource: "device" or "bus", whose bandwidth it uses.
    """

    op: str
    sizes: dict[str, int | str]
    bytes_moved: int
    calls: list[Callable[[], object]]
    check: Callable[[], str]
    resource: str = "device"


class Pools:
    """Random pages for all cases, in device memory.

    Args:
        pages: with K and V; each has DIGESTS digests.
        layers, heads: the layers that `layers` has, and KV heads.
    """

    def __init__(self, device: str, pages: int, layers: int, heads: int) -> None:
        self.device, self.pages, self.num_layers = device, pages, layers
        self.num_digests, self.H, self.HQ = DIGESTS * pages, heads, heads * G
        self._rng = torch.Generator(device).manual_seed(1)
        self.k, self.v = (self.random(pages, S, self.H, D).to(DTYPE) for _ in range(2))
        one, other = (self.random(self.num_digests, self.H, D).to(DTYPE) for _ in range(2))
        # Bits, means and norms of noise, scales and steps of 1.
        stats = self.noise(D + rotated.STATS_BYTES)
        stats[..., D : D + 64].view(torch.bfloat16).fill_(1)
        stats[..., D + 64 : D + 72].view(torch.float32).fill_(1)
        self.digests = {0: (torch.minimum(one, other), torch.maximum(one, other))}
        self.digests[2] = self.noise(*rotated.planes_shape(D)), stats
        self.means = torch.stack((one, other), 2)
        self.pilots = one[:, :, None, :PILOT_RANK].contiguous()
        self.digests_of = {
            "bounds": self.digests[0],
            "2 bits": self.digests[2],
            "means": (self.means,),
            "pilots": (self.pilots,),
        }

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._rng, device=self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._rng, device=self.device)

    def noise(self, *shape: int) -> torch.Tensor:
        out = torch.empty(self.num_digests, self.H, *shape, dtype=torch.uint8, device=self.device)
        return out.random_(generator=self._rng)

    def ids(self, *shape: int, dtype: torch.dtype = torch.int32, pages: int = 0) -> torch.Tensor:
        """Distinct pages in random order, among the first ``pages`` (0: among all that have K and V).

        Raises:
            ValueError: there are fewer.
        """
        pages, count = pages or self.pages, torch.Size(shape).numel()
        if count > pages:
            raise ValueError(f"{count} different ids of {pages} pages")
        order = torch.randperm(pages, generator=self._rng, device=self.device)
        return order[:count].view(shape).to(dtype)

    def slots(self) -> torch.Tensor:
        """Slots of all digests' pages, half of them negative."""
        return self.ids(self.num_digests, pages=self.num_digests) - self.num_digests // 2

    @functools.cache  # noqa: B019  # the pools live as long as the program
    def kv(self, dtype: torch.dtype = DTYPE, wide: bool = False) -> list[torch.Tensor]:
        """K and V; with ``wide``, fp8 values as bfloat16, for references."""
        halves = (x.to(dtype) for x in (self.k, self.v))
        return [x.to(DTYPE) if wide else x for x in halves]

    @functools.cache  # noqa: B019
    def layers(self, source: str, dtype: torch.dtype = DTYPE, wide: bool = False) -> LayerPages:
        """K and V by layer: on the "device", or on the "host", pinned as in an arena."""
        count = min(LAYER_PAGES, self.pages // self.num_layers)
        halves = [x[: count * self.num_layers] for x in self.kv(dtype, wide)]
        if source == "host" and self.device == "cuda":
            halves = torch.stack(halves).cpu().pin_memory()
        planes = (x.view(self.num_layers, count, S, self.H, D).unbind() for x in halves)
        return LayerPages.of(*planes, self.device)

    def full(self, value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def difference(
    op: Op, *arguments: object, of: tuple[object, ...] = (), rounded: bool = False
) -> str:
    """Difference of the kernel's result from the reference, with the op's tolerance for this dtype.

    Args:
        of: the reference's arguments, if different.
        rounded: the first result, or the weights of its sums, are rounded to bfloat16.
    """
    results = op.kernel(*arguments), op.reference(*(of or arguments))
    got, want = ((x,) if isinstance(x, torch.Tensor) else x for x in results)
    tolerances = [ROUNDED if rounded and not i else op.tolerance for i in range(len(got))]
    found = (
        tolerance.mismatch(g.double().cpu(), w.double().cpu())
        for tolerance, g, w in zip(tolerances, got, want, strict=True)
    )
    return next(filter(None, found), "")


def changed(
    op: Op,
    mutable: list[torch.Tensor],
    call: Callable[[Callable[..., Any]], object],
    share: float = 0.0,
) -> str:
    """The same for ops that write into their arguments, where ``call(function)`` calls the kernel or the reference:
    within tolerance, or equal except for a share of the written elements."""
    before = [t.clone() for t in mutable]
    call(op.kernel)
    got = [t.clone() for t in mutable]
    for tensor, old in zip(mutable, before, strict=True):
        tensor.copy_(old)
    call(op.reference)
    tolerance = op.tolerance
    for after, mine, old in zip(mutable, got, before, strict=True):
        if tolerance.rtol:
            if found := tolerance.mismatch(mine.double().cpu(), after.double().cpu()):
                return found
            continue
        after, mine, old = (x.view(torch.uint8) for x in (after, mine, old))
        wrong, written = ((after != x).sum().item() for x in (mine, old))
        if wrong > share * written:
            return f"{op.name}: {wrong} bytes differ where the reference writes {written}"
    return ""


def plain(op: Op, sizes: dict[str, int | str], nbytes: int, *arguments: object) -> Case:
    """A case with the same small arguments in every call, which stay cached in a real step too."""
    calls = [lambda: op.kernel(*arguments)] * REPEATS
    return Case(op.name, sizes, nbytes, calls, lambda: difference(op, *arguments))
