"""Every kernel of a decode step at some sizes: its inputs, bytes, calls and check. gpu_kernels.py runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sglang_scout.ops import rotated
from sglang_scout.ops.append import Pool, append_tokens
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.gather import copy_layer_pages
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.mass import mass_change_rotated
from sglang_scout.ops.merge import merge_states
from sglang_scout.ops.op import Op
from sglang_scout.ops.score import score_pages
from sglang_scout.ops.select import select_pages

S, G, D = 32, 5, 128  # Qwen3-14B, which has 8 KV heads
REPEATS = 8
DTYPE = torch.bfloat16
OPS = {
    0: (score_pages, build_layer_digests),
    **dict.fromkeys((1, 2), (rotated.score_rotated, rotated.build_layer_rotated)),
}
"""By the bits of a key element; with 0 a page has bounds."""


@dataclass
class Case:
    """One kernel at one size.

    Attributes:
        sizes: what the row says of it.
        bytes_moved: by one call.
        calls: like calls on different data, to be timed.
        check: what differs from the reference, "" if nothing.
        resource: "device" or "bus", which bandwidth its bytes take.
    """

    op: str
    sizes: dict[str, int | str]
    bytes_moved: int
    calls: list[Callable[[], object]]
    check: Callable[[], str]
    resource: str = "device"


class Pools:
    """Random pages for all cases, in device memory, more than the caches hold: of so many layers and KV heads."""

    def __init__(self, device: str, pages: int, layers: int, heads: int) -> None:
        self.device, self.pages, self.num_layers = device, pages, layers
        self.H, self.HQ = heads, heads * G
        self._rng = torch.Generator(device).manual_seed(1)
        self.k, self.v = (self.random(pages, S, self.H, D).to(DTYPE) for _ in range(2))
        # More digests than pages: those of 65,536 pages are 256 MiB, no cache holds them either.
        one, other = (self.random(4 * pages, self.H, D).to(DTYPE) for _ in range(2))
        # Bits and means of noise, scales and steps of 1.
        stats = self.noise(D + rotated.STATS_BYTES)
        stats[..., D : D + 64].view(torch.bfloat16).fill_(1)
        stats[..., D + 64 : D + 68].view(torch.float32).fill_(1)
        self.digests = {0: (torch.minimum(one, other), torch.maximum(one, other))}
        self.digests |= {
            bits: (self.noise(*rotated.planes_shape(bits, D)), stats) for bits in (1, 2)
        }

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._rng, device=self.device)

    def noise(self, *shape: int) -> torch.Tensor:
        out = torch.empty(4 * self.pages, self.H, *shape, dtype=torch.uint8, device=self.device)
        return out.random_(generator=self._rng)

    def ids(self, *shape: int, dtype: torch.dtype = torch.int32, pages: int = 0) -> torch.Tensor:
        """Different pages in random order, of the first ``pages`` (0: of all that have K and V).

        Raises:
            ValueError: there are fewer.
        """
        pages, count = pages or self.pages, torch.Size(shape).numel()
        if count > pages:
            raise ValueError(f"{count} different ids of {pages} pages")
        order = torch.randperm(pages, generator=self._rng, device=self.device)
        return order[:count].view(shape).to(dtype)

    @functools.cache  # noqa: B019  # the pools live as long as the program
    def layers(self, source: str) -> LayerPages:
        """K and V by layer: of "device", or of "host", page-locked as in an arena."""
        halves = self.k, self.v
        if source == "host" and self.device == "cuda":
            halves = (x.cpu().pin_memory() for x in halves)
        planes = (x.view(self.num_layers, -1, S, self.H, D).unbind() for x in halves)
        return LayerPages.of(*planes, self.device)

    def full(self, value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)


def difference(op: Op, *arguments: object) -> str:
    """Of the kernel's result from the reference's, by the tolerance of the op for this dtype."""
    name = "bfloat16" if "bfloat16" in op.tolerances else "float32"
    results = [op(*arguments, impl=impl) for impl in ("triton", "reference")]
    got, want = ((x,) if isinstance(x, torch.Tensor) else x for x in results)
    found = (
        op.tolerances[name].mismatch(g.double().cpu(), w.double().cpu())
        for g, w in zip(got, want, strict=True)
    )
    return next(filter(None, found), "")


def changed(
    op: Op, mutable: list[torch.Tensor], call: Callable[[str], object], share: float = 0.0
) -> str:
    """The same for ops that write into their arguments: equal but for a share of what is written."""
    before = [t.clone() for t in mutable]
    call("triton")
    got = [t.clone() for t in mutable]
    for tensor, old in zip(mutable, before, strict=True):
        tensor.copy_(old)
    call("reference")
    for after, mine, old in zip(mutable, got, before, strict=True):
        wrong, written = ((after != x).sum().item() for x in (mine, old))
        if wrong > share * written:
            return f"{op.name}: {wrong} elements differ where the reference writes {written}"
    return ""


def scores(pools: Pools, B: int, N: int, bits: int) -> Case:
    """The reference, which unpacks all bits, takes one row at a time."""
    op, digests = OPS[bits][0], pools.digests[bits]
    q, n_full, out = pools.random(B, pools.HQ, D).to(DTYPE), pools.full(N, B), pools.random(B, N)
    tables = [pools.ids(B, N, pages=len(digests[0])) for _ in range(REPEATS)]

    def call(table: torch.Tensor, rows: slice = slice(None), impl: str = "triton") -> torch.Tensor:
        arguments = (q[rows], *digests, table[rows], n_full[rows], D**-0.5, "mass")
        return op(*arguments, impl=impl, out=out[rows])

    def check() -> str:
        got = call(tables[0]).clone()
        for b in range(B):
            call(tables[0], slice(b, b + 1), "reference")
        return op.tolerances["bfloat16"].mismatch(got.cpu(), out.cpu())

    return Case(
        op.name,
        {"B": B, "N": N, "bits": bits},
        B * N * (sum(part[0].nbytes for part in digests) + 8) + q.nbytes,
        [lambda t=t: call(t) for t in tables],
        check,
    )


def attention(pools: Pools, B: int, resident: int, columns: int) -> Case:
    """``resident`` pages of each row lie in a table of ``columns``, at random places."""
    q, tail, length = pools.random(B, pools.HQ, D), pools.ids(B), pools.full(S // 2, B)
    tables = []
    for _ in range(REPEATS):
        table = pools.full(-1, B, columns)
        where = torch.argsort(pools.random(B, columns), dim=1)[:, :resident]
        tables.append(table.scatter_(1, where, pools.ids(B, resident)))
    out = torch.empty_like(q), torch.empty(B, pools.HQ, device=q.device)

    def call(table: torch.Tensor) -> object:
        arguments = (q, pools.k, pools.v, table, tail, length, D**-0.5)
        return attend_pages(*arguments, impl="triton", out=out)

    token_bytes = 2 * pools.H * D * DTYPE.itemsize
    return Case(
        "attend_pages",
        {"B": B, "resident": resident, "columns": columns},
        B * ((resident * S + S // 2) * token_bytes + 4 * columns) + 2 * q.nbytes + 4 * B * pools.HQ,
        [lambda t=t: call(t) for t in tables],
        lambda: difference(attend_pages, q, pools.k, pools.v, tables[0], tail, length, D**-0.5),
    )


def selection(pools: Pools, B: int, N: int, k: int) -> Case:
    table, n_full = pools.ids(B, N, pages=4 * pools.pages), pools.full(N, B)
    given = [torch.rand(B, N, device=pools.device) for _ in range(REPEATS)]
    slot_of = pools.ids(4 * pools.pages, pages=4 * pools.pages) - 2 * pools.pages

    def check() -> str:
        arguments = (given[0], table, n_full, slot_of, k)
        got, want = (select_pages(*arguments, impl=i) for i in ("triton", "reference"))
        # Forced pages stand first, in any order among themselves; random scores have no ties.
        same = list(map(set, got[0].tolist())) == list(map(set, want[0].tolist()))
        return "" if same and torch.equal(got[2], want[2]) else "other pages than the reference"

    return Case(
        "select_pages",
        {"B": B, "N": N, "k": k},
        B * (8 * N + 12 * k + 4),
        [lambda s=s: select_pages(s, table, n_full, slot_of, k, impl="triton") for s in given],
        check,
    )


def digests(pools: Pools, n: int, source: str, bits: int) -> Case:
    """Of n pages in every layer. A server reads their keys from the host."""
    layers, op, parts = pools.layers(source), OPS[bits][1], pools.digests[bits]
    L, P = pools.num_layers, len(layers.k[0])
    ids = [pools.ids(n, dtype=torch.int64, pages=P) for _ in range(REPEATS)]
    written = [part.new_zeros(L, P, *part.shape[1:]) for part in parts]

    def call(which: torch.Tensor, impl: str = "triton") -> object:
        return op(layers, which, *written, impl=impl)

    page_bytes = S * pools.H * D * DTYPE.itemsize
    digest_bytes = sum(part[0].nbytes for part in parts)
    on_bus = layers.k[0].device.type != pools.device
    return Case(
        op.name,
        {"pages": n, "layers": L, "from": source, "bits": bits},
        n * L * page_bytes if on_bus else n * (L * (page_bytes + digest_bytes) + 8),
        [lambda i=i: call(i) for i in ids],
        # Steps may differ by a rounding, and with them what lies next to a threshold.
        lambda: changed(op, written, lambda impl: call(ids[0], impl), 0.01 if bits else 0.0),
        "bus" if on_bus else "device",
    )


def copies(pools: Pools, n: int, source: str) -> Case:
    """Recall: K and V of n pages, dealt out over the layers, from the host or within device memory."""
    layers, L = pools.layers(source), pools.num_layers
    slots = torch.arange(n, device=pools.device)
    shape = (L, -(-n // L), S, pools.H, D)
    to = [torch.zeros(shape, dtype=DTYPE, device=pools.device) for _ in range(2)]
    drawn = (pools.ids(n, dtype=torch.int64, pages=len(layers.k[0])) for _ in range(REPEATS))
    ids = [torch.stack([slots % L, pages, slots // L]) for pages in drawn]
    kv_bytes = 2 * S * pools.H * D * DTYPE.itemsize
    on_bus = layers.k[0].device.type != pools.device
    return Case(
        "copy_layer_pages",
        {"pages": n, "layers": L, "from": source},
        n * kv_bytes if on_bus else n * (2 * kv_bytes + 24),
        [lambda i=i: copy_layer_pages(layers, i, *to, impl="triton") for i in ids],
        lambda: changed(
            copy_layer_pages, to, lambda impl: copy_layer_pages(layers, ids[0], *to, impl=impl)
        ),
        "bus" if on_bus else "device",
    )


def appended(pools: Pools, B: int) -> Case:
    k, v = (pools.random(B, pools.H, D).to(DTYPE) for _ in range(2))
    to, lens = Pool(pools.k.clone(), pools.v.clone(), pools.ids(B)), pools.full(7, B)

    def call(impl: str = "triton") -> object:
        return append_tokens(k, v, lens, to, impl=impl)

    return Case(
        "append_tokens",
        {"B": B},
        2 * (k.nbytes + v.nbytes) + 8 * B,
        [call] * REPEATS,
        lambda: changed(append_tokens, [to.k, to.v], call),
    )


def merged(pools: Pools, B: int) -> Case:
    parts = [pools.random(*size) for size in ((B, pools.HQ, D), (B, pools.HQ)) * 2]
    calls = [lambda: merge_states(*parts, impl="triton")] * REPEATS
    nbytes = 3 * sum(p.nbytes for p in parts[:2])
    return Case("merge_states", {"B": B}, nbytes, calls, lambda: difference(merge_states, *parts))


def mass_changes(pools: Pools, B: int, k: int, bits: int) -> Case:
    """Of the missing pages of a layer: few."""
    digests = pools.digests[bits]
    q, table = pools.random(B, pools.HQ, D), pools.ids(B, k, pages=len(digests[0]))
    queries = q, q + 0.1 * pools.random(B, pools.HQ, D)
    op = mass_change_rotated
    arguments = (*queries, *digests, table, pools.full(k, B), D**-0.5)
    nbytes = B * k * (sum(part[0].nbytes for part in digests) + 4) + 2 * q.nbytes
    calls = [lambda: op(*arguments, impl="triton")] * REPEATS
    return Case(
        op.name, {"B": B, "k": k, "bits": bits}, nbytes, calls, lambda: difference(op, *arguments)
    )


def cases(pools: Pools, small: bool) -> Iterator[Case]:
    """``small``: for the interpreter too, where a program takes a second."""
    for B, N in ((2, 40),) if small else ((1, 4096), (16, 2048), (64, 1024)):
        yield from (scores(pools, B, N, bits) for bits in OPS)
        yield selection(pools, B, N, 8 if small else 64)
    tables = ((2, 3, 9),) if small else ((1, 64, 64), (16, 64, 64), (16, 64, 2048), (64, 64, 64))
    for B, resident, columns in tables:
        yield attention(pools, B, resident, columns)
    for n in (3,) if small else (16, 512):
        for source in ("device", "host") if pools.device == "cuda" else ("device",):
            yield from (digests(pools, n, source, bits) for bits in OPS)
            yield copies(pools, n, source)
    for B in (2,) if small else (1, 64):
        yield appended(pools, B)
        yield merged(pools, B)
        yield mass_changes(pools, B, 3 if small else 8, 2)
