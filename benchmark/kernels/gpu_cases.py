"""Every kernel of a decode step at some sizes: its inputs, bytes, calls and check. gpu_kernels.py runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sglang_scout.core.page_bytes import PILOT_RANK
from sglang_scout.core.registry import Tolerance
from sglang_scout.ops import rotated
from sglang_scout.ops.append import Pool, append_tokens
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.embed import build_layer_means, build_layer_pilots, score_embeddings
from sglang_scout.ops.gather import copy_layer_pages
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.mass import mass_change_rotated
from sglang_scout.ops.merge import merge_states
from sglang_scout.ops.op import Op
from sglang_scout.ops.pack import pack_pages
from sglang_scout.ops.predict import add_norm, rotate_heads
from sglang_scout.ops.salience import decay_mass, salient_bits
from sglang_scout.ops.score import score_pages
from sglang_scout.ops.select import select_pages
from sglang_scout.ops.stage import stage_pages
from sglang_scout.ops.stamp import write_stamp

S, G, D = 32, 5, 128  # Qwen3-14B, which has 8 KV heads
HIDDEN = 5120
REPEATS = 8
DTYPE, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
SCORES = {0: score_pages, 1: rotated.score_rotated, 2: rotated.score_rotated}
"""By bits per key element; 0: per-channel bounds."""
BUILDS = {
    "bounds": build_layer_digests, "1 bit": rotated.build_layer_rotated, "2 bits": rotated.build_layer_rotated,
    "means": build_layer_means, "pilots": build_layer_pilots,
}  # fmt: skip
ROUNDED = Tolerance(2**-8, 2**-8, "rounded to bfloat16")


@dataclass
class Case:
    """One kernel at one size.

    Attributes:
        sizes: fields of its row.
        bytes_moved: by one call.
        calls: equivalent calls on different data, to be timed.
        check: the difference from the reference, "" if none.
        resource: "device" or "bus", whose bandwidth it uses.
        impl: of the op.
        absent: why it cannot run here.
        eager: the calls cannot be captured in a graph.
    """

    op: str
    sizes: dict[str, int | str]
    bytes_moved: int
    calls: list[Callable[[], object]]
    check: Callable[[], str]
    resource: str = "device"
    impl: str = "triton"
    absent: str = ""
    eager: bool = False


class Pools:
    """Random pages for all cases, in device memory, larger than the caches, for some layers and KV heads."""

    def __init__(self, device: str, pages: int, layers: int, heads: int) -> None:
        self.device, self.pages, self.num_layers = device, pages, layers
        self.H, self.HQ = heads, heads * G
        self._rng = torch.Generator(device).manual_seed(1)
        self.k, self.v = (self.random(pages, S, self.H, D).to(DTYPE) for _ in range(2))
        # More digests than pages: those of 65,536 pages are 256 MiB, also larger than the caches.
        one, other = (self.random(4 * pages, self.H, D).to(DTYPE) for _ in range(2))
        # Bits, means and norms of noise, scales and steps of 1.
        stats = self.noise(D + rotated.STATS_BYTES)
        stats[..., D : D + 64].view(torch.bfloat16).fill_(1)
        stats[..., D + 64 : D + 72].view(torch.float32).fill_(1)
        self.digests = {0: (torch.minimum(one, other), torch.maximum(one, other))}
        self.digests |= {
            bits: (self.noise(*rotated.planes_shape(bits, D)), stats) for bits in (1, 2)
        }
        self.means = torch.stack((one, other), 2)
        self.pilots = one[:, :, None, :PILOT_RANK].contiguous()
        self.digests_of = {
            "bounds": self.digests[0], "1 bit": self.digests[1], "2 bits": self.digests[2],
            "means": (self.means,), "pilots": (self.pilots,),
        }  # fmt: skip

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._rng, device=self.device)

    def noise(self, *shape: int) -> torch.Tensor:
        out = torch.empty(4 * self.pages, self.H, *shape, dtype=torch.uint8, device=self.device)
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

    @functools.cache  # noqa: B019  # the pools live as long as the program
    def kv(self, dtype: torch.dtype = DTYPE, wide: bool = False) -> list[torch.Tensor]:
        """K and V; with ``wide``, fp8 values as bfloat16, for references."""
        halves = (x.to(dtype) for x in (self.k, self.v))
        return [x.to(DTYPE) if wide else x for x in halves]

    @functools.cache  # noqa: B019
    def layers(self, source: str, dtype: torch.dtype = DTYPE, wide: bool = False) -> LayerPages:
        """K and V by layer: on the "device", or on the "host", pinned as in an arena."""
        halves = iter(self.kv(dtype, wide))
        if source == "host" and self.device == "cuda":
            halves = torch.stack([*halves]).cpu().pin_memory()  # whole pages apart
        planes = (x.view(self.num_layers, -1, S, self.H, D).unbind() for x in halves)
        return LayerPages.of(*planes, self.device)

    def full(self, value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tolerance_of(op: Op) -> Tolerance:
    return op.tolerances["bfloat16" if "bfloat16" in op.tolerances else "float32"]


def difference(
    op: Op, *arguments: object, impl: str = "triton", of: tuple[object, ...] = (), rounded: bool = False
) -> str:  # fmt: skip
    """Difference of the kernel's result from the reference, with the op's tolerance for this dtype.

    Args:
        of: the reference's arguments, if different.
        rounded: the first result is rounded to bfloat16.
    """
    results = op(*arguments, impl=impl), op(*(of or arguments), impl="reference")
    got, want = ((x,) if isinstance(x, torch.Tensor) else x for x in results)
    tolerances = [ROUNDED if rounded and not i else tolerance_of(op) for i in range(len(got))]
    found = (
        tolerance.mismatch(g.double().cpu(), w.double().cpu())
        for tolerance, g, w in zip(tolerances, got, want, strict=True)
    )
    return next(filter(None, found), "")


def changed(
    op: Op, mutable: list[torch.Tensor], call: Callable[[str], object], share: float = 0.0, impl: str = "triton"
) -> str:  # fmt: skip
    """The same for ops that write into their arguments: within tolerance, or equal except for a share of the written
    elements."""
    before = [t.clone() for t in mutable]
    call(impl)
    got = [t.clone() for t in mutable]
    for tensor, old in zip(mutable, before, strict=True):
        tensor.copy_(old)
    call("reference")
    tolerance = tolerance_of(op)
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
    calls = [lambda: op(*arguments, impl="triton")] * REPEATS
    return Case(op.name, sizes, nbytes, calls, lambda: difference(op, *arguments))


def scores(pools: Pools, B: int, N: int, bits: int) -> Case:
    """Page scoring. The reference, which unpacks all bits, processes one row at a time."""
    op, digests = SCORES[bits], pools.digests[bits]
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


def embedding_scores(pools: Pools, B: int, N: int, embeddings: torch.Tensor) -> Case:
    q, n_full = pools.random(B * pools.H, embeddings.shape[-1]).to(DTYPE), pools.full(N, B)
    tables = [pools.ids(B, N, pages=len(embeddings)) for _ in range(REPEATS)]
    call = functools.partial(score_embeddings, q, embeddings, n_full=n_full)
    return Case(
        "score_embeddings",
        {"B": B, "N": N, "W": embeddings.shape[2]},
        B * N * (embeddings[0].nbytes + 4 * pools.H + 4),
        [lambda t=t: call(table=t, impl="triton") for t in tables],
        lambda: difference(score_embeddings, q, embeddings, tables[0], n_full),
    )


def attention(
    pools: Pools, B: int, resident: int, columns: int, kv: torch.dtype = DTYPE, impl: str = "triton"
) -> Case:
    """Attention over ``resident`` pages per row, at random positions in a table of ``columns``."""
    q, tail, length = pools.random(B, pools.HQ, D).to(DTYPE), pools.ids(B), pools.full(S // 2, B)
    tables = []
    for _ in range(REPEATS):
        table = pools.full(-1, B, columns)
        where = torch.argsort(pools.random(B, columns), dim=1)[:, :resident]
        tables.append(table.scatter_(1, where, pools.ids(B, resident)))

    def arguments(table: torch.Tensor, wide: bool = False) -> tuple[object, ...]:
        return q, *pools.kv(kv, wide), table, tail, length, D**-0.5

    token_bytes = 2 * pools.H * D * kv.itemsize
    return Case(
        "attend_pages",
        {"B": B, "resident": resident, "columns": columns, "kv": name_of(kv)},
        B * ((resident * S + S // 2) * token_bytes + 4 * columns) + 3 * q.nbytes + 4 * B * pools.HQ,
        [lambda t=t: attend_pages(*arguments(t), impl=impl) for t in tables],
        lambda: difference(
            attend_pages, *arguments(tables[0]), impl=impl, of=arguments(tables[0], wide=True), rounded=impl == "flash",
        ),
        impl=impl,
        absent="; ".join(attend_pages.reasons(*arguments(tables[0]))[impl]),
    )  # fmt: skip


def packed(pools: Pools, B: int, columns: int) -> Case:
    table, rows = pools.ids(B, columns, pages=4 * pools.pages), pools.full(columns, B)
    slot_of = pools.ids(4 * pools.pages, pages=4 * pools.pages) - 2 * pools.pages
    arguments = (table, pools.ids(B), pools.full(7, B), S, slot_of, rows)
    return plain(pack_pages, {"B": B, "columns": columns}, B * (12 * columns + 20), *arguments)


def selection(pools: Pools, B: int, N: int, k: int) -> Case:
    table, n_full = pools.ids(B, N, pages=4 * pools.pages), pools.full(N, B)
    given = [torch.rand(B, N, device=pools.device) for _ in range(REPEATS)]
    slot_of = pools.ids(4 * pools.pages, pages=4 * pools.pages) - 2 * pools.pages

    def check() -> str:
        arguments = (given[0], table, n_full, slot_of, k)
        got, want = (select_pages(*arguments, impl=i) for i in ("triton", "reference"))
        # Forced pages come first, in any order among themselves; random scores have no ties.
        same = list(map(set, got[0].tolist())) == list(map(set, want[0].tolist()))
        return "" if same and torch.equal(got[2], want[2]) else "other pages than the reference"

    return Case(
        "select_pages",
        {"B": B, "N": N, "k": k},
        B * (8 * N + 12 * k + 4),
        [lambda s=s: select_pages(s, table, n_full, slot_of, k, impl="triton") for s in given],
        check,
    )


def digests(pools: Pools, n: int, source: str, kind: str, kv: torch.dtype = DTYPE) -> Case:
    """Digests of n pages in every layer. A server reads their KV from the host."""
    layers, op, parts = pools.layers(source, kv), BUILDS[kind], pools.digests_of[kind]
    L, P = pools.num_layers, len(layers.k[0])
    ids = [pools.ids(n, dtype=torch.int64, pages=P) for _ in range(REPEATS)]
    written = [part.new_zeros(L, P, *part.shape[1:]) for part in parts]
    more = (pools.random(L, pools.H, PILOT_RANK, 2 * D),) if kind == "pilots" else ()

    def call(which: torch.Tensor, impl: str = "triton") -> object:
        of = pools.layers(source, kv, wide=True) if impl == "reference" else layers
        return op(of, which, *written, *more, impl=impl)

    page_bytes = S * pools.H * D * kv.itemsize * (2 if "bit" in kind else 1)  # V too
    digest_bytes = sum(part[0].nbytes for part in parts)
    on_bus = layers.k[0].device.type != pools.device
    return Case(
        op.name,
        {"pages": n, "layers": L, "from": source, "digest": kind, "kv": name_of(kv)},
        n * L * page_bytes if on_bus else n * (L * (page_bytes + digest_bytes) + 8),
        [lambda i=i: call(i) for i in ids],
        # Steps may differ by rounding, and with them values close to a threshold.
        lambda: changed(op, written, lambda impl: call(ids[0], impl), 0.01 if "bit" in kind else 0.0),
        "bus" if on_bus else "device",
    )  # fmt: skip


def copies(pools: Pools, n: int, source: str, impl: str = "triton") -> Case:
    """Recall: K and V of n pages, distributed over the layers, from the host or within device memory."""
    layers, L = pools.layers(source), pools.num_layers
    slots = torch.arange(n)
    shape = (L, -(-n // L), S, pools.H, D)
    to = [torch.zeros(shape, dtype=DTYPE, device=pools.device) for _ in range(2)]
    drawn = (pools.ids(n, dtype=torch.int64, pages=len(layers.k[0])).cpu() for _ in range(REPEATS))
    ids = [torch.stack([slots % L, pages, slots // L]) for pages in drawn]
    eager = impl == "memcpy"
    if not eager:  # on the device before capture
        ids = [x.to(pools.device) for x in ids]
    kv_bytes = 2 * S * pools.H * D * DTYPE.itemsize
    on_bus = layers.k[0].device.type != pools.device
    return Case(
        "copy_layer_pages",
        {"pages": n, "layers": L, "from": source},
        n * kv_bytes if on_bus else n * (2 * kv_bytes + 24),
        [lambda i=i: copy_layer_pages(layers, i, *to, impl=impl) for i in ids],
        lambda: changed(
            copy_layer_pages, to, lambda impl: copy_layer_pages(layers, ids[0], *to, impl=impl), impl=impl
        ),
        "bus" if on_bus else "device",
        impl,
        eager=eager,
    )  # fmt: skip


def staged(pools: Pools, lists: int, k: int, heads: int) -> Case:
    """Pages of one layer copied to staging slots, whole or one KV head each."""
    layers = pools.layers("host")
    to = [torch.zeros(lists * k, S, heads, D, dtype=DTYPE, device=pools.device) for _ in range(2)]
    pages = [pools.ids(lists, k, pages=len(layers.k[0])) for _ in range(REPEATS)]
    for some in pages:
        some[:, -1] = -1
    kv_bytes = 2 * S * heads * D * DTYPE.itemsize
    return Case(
        "stage_pages",
        {"lists": lists, "k": k, "heads": heads},
        lists * (k - 1) * kv_bytes,
        [lambda p=p: stage_pages(layers, 1, p, *to, impl="triton") for p in pages],
        lambda: changed(stage_pages, to, lambda impl: stage_pages(layers, 1, pages[0], *to, impl=impl)),
        "bus" if pools.device == "cuda" else "device",
    )  # fmt: skip


def appended(pools: Pools, B: int, kv: torch.dtype = DTYPE) -> Case:
    k, v = (pools.random(B, pools.H, D).to(DTYPE) for _ in range(2))
    to = Pool(*(x.clone() for x in pools.kv(kv, False)), pools.ids(B))
    lens = pools.full(7, B)

    def call(impl: str = "triton") -> object:
        return append_tokens(k, v, lens, to, impl=impl)

    return Case(
        "append_tokens",
        {"B": B, "kv": name_of(kv)},
        (k.nbytes + v.nbytes) // 2 * (2 + kv.itemsize) + 8 * B,
        [call] * REPEATS,
        lambda: changed(append_tokens, [to.k, to.v], call),
    )


def merged(pools: Pools, B: int) -> Case:
    parts = [pools.random(*size) for size in ((B, pools.HQ, D), (B, pools.HQ)) * 2]
    return plain(merge_states, {"B": B}, 3 * sum(p.nbytes for p in parts[:2]), *parts)


def predicted(pools: Pools, B: int) -> Iterator[Case]:
    """The parts of a layer's predicted query around its matrix product."""
    x, residual, weight = (pools.random(*s, HIDDEN).to(DTYPE) for s in ((B,), (B,), ()))
    yield plain(add_norm, {"B": B}, 3 * x.nbytes + weight.nbytes, x, residual, weight, 1e-6)
    q, table = pools.random(B, pools.HQ * D).to(DTYPE), pools.random(4096, D)
    at = torch.arange(B, device=q.device)
    arguments = (q, weight[:D].contiguous(), 1e-6, table, at, D, True, pools.HQ, D)
    yield plain(rotate_heads, {"B": B}, 2 * q.nbytes + 4 * B * D, *arguments)


def window_weights(pools: Pools, B: int, W: int, kv: torch.dtype = DTYPE) -> Iterator[Case]:
    """HGCA's moving averages over a window of W pages, and the tokens kept of pages that leave it."""
    q, lse = pools.random(B, pools.HQ, D).to(DTYPE), pools.random(B, pools.HQ) + 8
    maw = torch.rand(B, W, pools.H, S, device=pools.device)
    pages, slot_of = pools.ids(B, W - 1), pools.ids(pools.pages)
    window = pages, pools.full(W - 1, B), slot_of, pools.ids(B), pools.full(7, B)
    rows = pools.full(0, B), torch.arange(B, dtype=torch.int32, device=pools.device)

    def call(impl: str = "triton") -> object:
        k = pools.kv(kv, impl == "reference")[0]
        return decay_mass(q, lse, k, *window, *rows, rows[0], maw, 0.1, D**-0.5, impl=impl)

    yield Case(
        "decay_mass",
        {"B": B, "W": W, "kv": name_of(kv)},
        B * W * S * pools.H * (D * kv.itemsize + 8),
        [call] * REPEATS,
        lambda: changed(decay_mass, [maw], call),
    )
    limits, nbytes = pools.random(1, B, pools.H) * 0.1 + 0.5, 4 * B * pools.H * (S + 1)
    yield plain(salient_bits, {"n": B}, nbytes, maw[None], rows[1], rows[0], limits)


def stamped(pools: Pools) -> Case:
    stamps = torch.zeros(2, dtype=torch.int64, device=pools.device)

    def check() -> str:
        write_stamp(stamps, 0)
        write_stamp(stamps, 1)
        first, second = stamps.tolist()
        return "" if 0 < first <= second else f"stamps are {first} and {second}"

    return Case("write_stamp", {}, 8, [lambda: write_stamp(stamps, 0)] * REPEATS, check)


def mass_changes(pools: Pools, B: int, k: int, bits: int) -> Case:
    """Change of mass of a layer's (few) missing pages."""
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
    """Every kernel except the ring's, which benchmark/ring runs; ``small``: feasible in the interpreter too, where a
    program takes a second."""
    for B, N in ((2, 40),) if small else ((1, 4096), (16, 2048), (64, 1024)):
        yield from (scores(pools, B, N, bits) for bits in SCORES)
        yield from (embedding_scores(pools, B, N, x) for x in (pools.means, pools.pilots))
        yield selection(pools, B, N, 8 if small else 64)
    tables = ((2, 3, 9),) if small else ((1, 64, 64), (16, 64, 64), (16, 64, 2048), (64, 64, 64))
    for sizes in tables:
        yield attention(pools, *sizes)
        yield attention(pools, *sizes, E4M3)
        yield attention(pools, *sizes, impl="flash")
    yield attention(pools, *tables[0], E5M2)
    yield packed(pools, 2 if small else 16, 9 if small else 2048)
    on_cuda = pools.device == "cuda"
    for n in (3,) if small else (16, 512):
        for source in ("device", "host") if on_cuda else ("device",):
            yield from (digests(pools, n, source, kind) for kind in BUILDS)
            yield copies(pools, n, source)
        if on_cuda:
            yield copies(pools, n, "host", "memcpy")
    yield from (digests(pools, 3 if small else 512, "device", kind, E4M3) for kind in BUILDS)
    for heads in (pools.H, 1):
        yield staged(pools, (2 if small else 16) * pools.H // heads, 2 if small else 8, heads)
    for B in (2,) if small else (1, 64):
        yield from (appended(pools, B, kv) for kv in (DTYPE, E4M3, E5M2))
        yield merged(pools, B)
        yield mass_changes(pools, B, 3 if small else 8, 2)
        yield from predicted(pools, B)
    for kv in (DTYPE, E4M3):
        yield from window_weights(pools, 2 if small else 16, 3 if small else 128, kv)
    yield stamped(pools)
