"""Every kernel as a `Case` of any size. gpu_kernels.py has the sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmark.kernels.gpu_pools import (
    DTYPE,
    PILOT_RANK,
    REPEATS,
    Case,
    D,
    Op,
    Pools,
    S,
    changed,
    difference,
    name_of,
    plain,
)
from sglang_scout.engine.device import write_stamp
from sglang_scout.ops import (
    attend,
    minmax,
    pages,
    predict,
    rotated,
    select,
)
from sglang_scout.ops import triton as kernels
from sglang_scout.ops.pages import Pool

ATTEND = Op(kernels.attend.attend_pages, attend.attend_pages_reference)
MERGE = Op(kernels.attend.merge_states, attend.merge_states_reference)
SELECT = Op(kernels.select.select_pages, select.select_pages_reference)
MASS_CHANGE = Op(kernels.rotated_scores.mass_change_rotated, rotated.mass_change_rotated_reference)
COPY = Op(kernels.pages.copy_layer_pages, pages.copy_layer_pages_reference)
STAGE = Op(kernels.pages.stage_pages, pages.stage_pages_reference)
APPEND = Op(kernels.pages.append_tokens, pages.append_tokens_reference)
ADD_NORM = Op(kernels.predict.add_norm, predict.add_norm_reference)
ROTATE_HEADS = Op(kernels.predict.rotate_heads, predict.rotate_heads_reference)
_BY_BITS = Op(kernels.rotated_scores.score_rotated, rotated.score_rotated_reference)
_ROTATE = Op(kernels.rotated.build_layer_rotated, rotated.build_layer_rotated_reference)

HIDDEN = 5120  # of Qwen3-14B, with 8 KV heads of 5 query heads each
SCORES = {0: Op(kernels.score.score_pages, minmax.score_pages_reference), 2: _BY_BITS}
"""By bits per key element; 0: per-channel bounds."""
BUILDS = {
    "bounds": Op(kernels.pages.build_layer_digests, minmax.build_layer_digests_reference),
    "2 bits": _ROTATE,
}


def scores(pools: Pools, B: int, N: int, bits: int) -> Case:
    """Page scoring. The reference, which unpacks all bits, processes one row at a time."""
    op, digests = SCORES[bits], pools.digests[bits]
    q, n_full = pools.random(B, pools.HQ, D).to(DTYPE), pools.full(N, B)
    tables = [pools.ids(B, N, pages=len(digests[0])) for _ in range(REPEATS)]

    def call(function: Any, table: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        return function(q[rows], *digests, table[rows], n_full[rows], D**-0.5)

    def check() -> str:
        rows = (slice(b, b + 1) for b in range(B))
        want = torch.cat([call(op.reference, tables[0], row) for row in rows])
        return op.tolerance.mismatch(call(op.kernel, tables[0]).cpu(), want.cpu())

    return Case(
        op.name,
        {"B": B, "N": N, "bits": bits},
        B * N * (sum(part[0].nbytes for part in digests) + 8) + q.nbytes,
        [lambda t=t: call(op.kernel, t) for t in tables],
        check,
    )


def attention(pools: Pools, B: int, resident: int, columns: int, kv: torch.dtype = DTYPE) -> Case:
    """Attention over ``resident`` pages per row, at random positions in a table of ``columns``."""
    q, tail, length = pools.random(B, pools.HQ, D).to(DTYPE), pools.ids(B), pools.full(S // 2, B)
    tables = []
    for _ in range(REPEATS):
        table = pools.full(-1, B, columns)
        where = torch.argsort(pools.random(B, columns), dim=1)[:, :resident]
        tables.append(table.scatter_(1, where, pools.ids(B, resident)))

    def arguments(table: torch.Tensor, wide: bool = False) -> tuple[object, ...]:
        return q, *pools.kv(kv, wide), table, tail, length, D**-0.5

    def check() -> str:
        given, wide = arguments(tables[0]), arguments(tables[0], wide=True)
        return difference(ATTEND, *given, of=wide, rounded=True)

    token_bytes = 2 * pools.H * D * kv.itemsize
    return Case(
        "attend_pages",
        {"B": B, "resident": resident, "columns": columns, "kv": name_of(kv)},
        B * ((resident * S + S // 2) * token_bytes + 4 * columns) + 3 * q.nbytes + 4 * B * pools.HQ,
        [lambda t=t: ATTEND.kernel(*arguments(t)) for t in tables],
        check,
    )


def selection(pools: Pools, B: int, N: int, k: int) -> Case:
    table, n_full = pools.ids(B, N, pages=pools.num_digests), pools.full(N, B)
    given = [pools.uniform(B, N) for _ in range(REPEATS)]
    slot_of = pools.slots()
    of_row = table, n_full, slot_of, k, 1, 1

    def check() -> str:
        got, want = (f(given[0], *of_row) for f in (SELECT.kernel, SELECT.reference))
        # Forced pages come first, in any order among themselves; random scores have no ties.
        same = list(map(set, got[0].tolist())) == list(map(set, want[0].tolist()))
        return "" if same and torch.equal(got[2], want[2]) else "other pages than the reference"

    return Case(
        "select_pages",
        {"B": B, "N": N, "k": k},
        B * (8 * N + 12 * k + 4),
        [lambda s=s: SELECT.kernel(s, *of_row) for s in given],
        check,
    )


def digests(pools: Pools, n: int, source: str, kind: str, kv: torch.dtype = DTYPE) -> Case:
    """Digests of n pages in every layer. A server reads their KV from the host."""
    layers, op, parts = pools.layers(source, kv), BUILDS[kind], pools.digests_of[kind]
    L, P = pools.num_layers, len(layers.k[0])
    ids = [pools.ids(n, dtype=torch.int64, pages=P) for _ in range(REPEATS)]
    written = [part.new_zeros(L, P, *part.shape[1:]) for part in parts]
    more: tuple[Any, ...] = ()
    if kind == "pilots":
        more = (pools.random(L, pools.H, PILOT_RANK, 2 * D),)

    def call(function: Any, which: torch.Tensor) -> object:
        of = pools.layers(source, kv, wide=True) if function is op.reference else layers
        return function(of, which, *written, *more)

    # Steps may differ by rounding, and with them values close to a threshold.
    is_rotated, share = "bit" in kind, 0.01 if "bit" in kind else 0.0
    page_bytes = S * pools.H * D * kv.itemsize * (1 + is_rotated)  # V too
    digest_bytes = sum(part[0].nbytes for part in parts)
    on_bus = layers.k[0].device.type != pools.device
    return Case(
        op.name,
        {"pages": n, "layers": L, "from": source, "digest": kind, "kv": name_of(kv)},
        n * L * page_bytes if on_bus else n * (L * (page_bytes + digest_bytes) + 8),
        [lambda i=i: call(op.kernel, i) for i in ids],
        lambda: changed(op, written, lambda function: call(function, ids[0]), share),
        "bus" if on_bus else "device",
    )


def copies(pools: Pools, n: int, source: str) -> Case:
    """Recall: K and V of n pages, distributed over the layers, from the host or within device memory."""
    layers, L = pools.layers(source), pools.num_layers
    slots = torch.arange(n)
    shape = (L, -(-n // L), S, pools.H, D)
    to = [torch.zeros(shape, dtype=DTYPE, device=pools.device) for _ in range(2)]
    drawn = (pools.ids(n, dtype=torch.int64, pages=len(layers.k[0])).cpu() for _ in range(REPEATS))
    # On the device before capture.
    ids = [torch.stack([slots % L, pages, slots // L]).to(pools.device) for pages in drawn]

    kv_bytes = 2 * S * pools.H * D * DTYPE.itemsize
    on_bus = layers.k[0].device.type != pools.device
    return Case(
        "copy_layer_pages",
        {"pages": n, "layers": L, "from": source},
        n * kv_bytes if on_bus else n * (2 * kv_bytes + 24),
        [lambda i=i: COPY.kernel(layers, i, *to) for i in ids],
        lambda: changed(COPY, to, lambda function: function(layers, ids[0], *to)),
        "bus" if on_bus else "device",
    )


def staged(pools: Pools, lists: int, k: int, heads: int) -> Case:
    """Pages of one layer copied to staging slots, whole or one KV head each."""
    layers = pools.layers("host")
    to = [torch.zeros(lists * k, S, heads, D, dtype=DTYPE, device=pools.device) for _ in range(2)]
    listed = [pools.ids(lists, k, pages=len(layers.k[0])) for _ in range(REPEATS)]
    for some in listed:
        some[:, -1] = -1

    kv_bytes = 2 * S * heads * D * DTYPE.itemsize
    return Case(
        "stage_pages",
        {"lists": lists, "k": k, "heads": heads},
        lists * (k - 1) * kv_bytes,
        [lambda p=p: STAGE.kernel(layers, 1, p, *to) for p in listed],
        lambda: changed(STAGE, to, lambda function: function(layers, 1, listed[0], *to)),
        "bus" if pools.device == "cuda" else "device",
    )


def appended(pools: Pools, B: int, kv: torch.dtype = DTYPE) -> Case:
    k, v = (pools.random(B, pools.H, D).to(DTYPE) for _ in range(2))
    to = Pool(*(x.clone() for x in pools.kv(kv, False)), pools.ids(B))
    lens = pools.full(7, B)

    return Case(
        "append_tokens",
        {"B": B, "kv": name_of(kv)},
        (k.nbytes + v.nbytes) // 2 * (2 + kv.itemsize) + 8 * B,
        [lambda: APPEND.kernel(k, v, lens, to)] * REPEATS,
        lambda: changed(APPEND, [to.k, to.v], lambda function: function(k, v, lens, to)),
    )


def merged(pools: Pools, B: int) -> Case:
    parts = [pools.random(*size) for size in ((B, pools.HQ, D), (B, pools.HQ)) * 2]
    return plain(MERGE, {"B": B}, 3 * sum(p.nbytes for p in parts[:2]), *parts)


def predicted(pools: Pools, B: int) -> Iterator[Case]:
    """The parts of a layer's predicted query around its matrix product."""
    x, residual, weight = (pools.random(*s, HIDDEN).to(DTYPE) for s in ((B,), (B,), ()))
    yield plain(ADD_NORM, {"B": B}, 3 * x.nbytes + weight.nbytes, x, residual, weight, 1e-6)
    q, table = pools.random(B, pools.HQ * D).to(DTYPE), pools.random(4096, D)
    at = torch.arange(B, device=q.device)
    arguments = (q, weight[:D].contiguous(), 1e-6, table, at, D, True, pools.HQ, D)
    yield plain(ROTATE_HEADS, {"B": B}, 2 * q.nbytes + 4 * B * D, *arguments)


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
    arguments = (*queries, *digests, table, pools.full(k, B), D**-0.5)
    nbytes = B * k * (sum(part[0].nbytes for part in digests) + 4) + 2 * q.nbytes
    return plain(MASS_CHANGE, {"B": B, "k": k, "bits": bits}, nbytes, *arguments)
