"""Every function that launches Triton kernels, with arguments in the shapes of models and without data, for
compile_kernels.py."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch

from sglang_scout.engine.device import write_stamp
from sglang_scout.engine.graph_transport import GraphTransport
from sglang_scout.ops import triton as kernels
from sglang_scout.ops.pages import LayerPages
from sglang_scout.ops.rotated import STATS_BYTES, planes_shape
from sglang_scout.ops.triton import attend, doorbell, pages, predict, rotated, rotated_scores, score
from sglang_scout.worker.ring import ArenaSpec, Split, layout_of

learned = hgca = None
with contextlib.suppress(ModuleNotFoundError):
    from sglang_scout.policy.hgca import kernels as hgca
with contextlib.suppress(ModuleNotFoundError):
    from sglang_scout.policy.learned import kernels as learned

PROCESSORS = 132  # SMs of an H100, which determine the splits of attention
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MODEL_DTYPES = {E4M3: BF16, E5M2: BF16}  # by that of KV, where it is another
I32, I64 = torch.int32, torch.int64


def empty(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


Case = tuple[Callable[..., object], str, tuple]
"""A function that launches kernels, what tells this call from others, and arguments in the shapes of a model."""

MODELS = {  # H, G, D, dtype of KV, batch, pages: every size and dtype once, not every pair of them
    "Qwen3-14B": (8, 5, 128, BF16, 16, 2048),
    "Qwen3-14B, e4m3": (8, 5, 128, E4M3, 16, 2048),
    "D=256": (4, 8, 256, BF16, 8, 1024),
    "D=96": (8, 3, 96, E5M2, 8, 1250),  # 40,000 tokens: not a power of two
    "float32": (2, 2, 64, F32, 4, 64),
    "float16": (8, 8, 128, F16, 1, 4096),
    "all one": (1, 1, 16, BF16, 1, 1),  # Triton takes arguments that are 1 as constants
}


def cases() -> Iterator[Case]:
    attend.processors = lambda _device: PROCESSORS
    makers = [choosing_and_attending, pages_of_all_layers]
    makers += [of_learned_policies] * bool(learned) + [of_hgca] * bool(hgca)
    for model, make in itertools.product(MODELS, makers):
        for call, about, arguments in make(model):
            yield call, f"{about}, {model}", arguments
    yield from parts_of_a_step()
    yield from ring_calls()


def choosing_and_attending(model: str) -> Iterator[Case]:
    H, G, D, dtype, B, N = MODELS[model]
    P, S = 4096, 32
    q, row = empty(B, H * G, D), empty(B, dtype=I32)
    own = MODEL_DTYPES.get(dtype, dtype)
    real_q = q.to(own)
    k, v = empty(P, S, H, D, dtype=dtype), empty(P, S, H, D, dtype=dtype)
    digests = empty(P, H, D, dtype=own), empty(P, H, D, dtype=own)
    table = empty(B, N, dtype=I32)
    yield score.score_pages, "", (q, *digests, table, row, 0.1)
    parts = rotated_parts(model, P)
    yield rotated_scores.score_rotated, "", (q, *parts, table, row, 0.1)
    arguments = (real_q, real_q, *parts, table[:, :64], row, 0.1)
    yield rotated_scores.mass_change_rotated, "", arguments
    yield attend.attend_pages, "", (real_q, k, v, table, row, row, 0.1, table[0], row)
    if model in ("Qwen3-14B", "D=256"):
        lists, counts = empty(B * H, N, dtype=I32), empty(B * H, dtype=I32)
        arguments = (real_q, k, v, lists, row, row, 0.1, table[0], counts)
        yield attend.attend_pages, ", a list per head", arguments
    if model == "all one":
        yield attend.attend_pages, " without a last page", (real_q, k, v, table, None, None, 0.1)
        yield kernels.select.select_pages, "", (empty(1, 1), table, row, row, 1, 1, 0)


def of_learned_policies(model: str) -> Iterator[Case]:
    H, _, D, dtype, B, N = MODELS[model]
    L, P, own, row = 3, 4096, MODEL_DTYPES.get(dtype, dtype), empty(B, dtype=I32)
    for W, E in ((2, D), (1, 32)):
        arguments = empty(B * H, E), empty(P, H, W, E, dtype=own), empty(B, N, dtype=I32), row
        yield learned.score_embeddings, f", {W} of {E}", arguments
    k = empty(P, 32, H, D, dtype=dtype)
    layers, ids = LayerPages.of([k] * L, [k] * L, "meta"), empty(64, dtype=I64)
    of_slots = {" of slots": empty(L, 64, dtype=I64)} if model == "Qwen3-14B" else {}
    for of, rows in {"": None, **of_slots}.items():
        yield learned.build_layer_means, of, (layers, ids, empty(L, P, H, 2, D, dtype=own), rows)
        embeddings, w_k = empty(L, P, H, 1, 32, dtype=own), empty(L, H, 32, 2 * D)
        yield learned.build_layer_pilots, of, (layers, ids, embeddings, w_k, rows)


def of_hgca(model: str) -> Iterator[Case]:
    H, G, D, dtype, B, N = MODELS[model]
    W, row = min(N, 128), empty(B, dtype=I32)
    q = empty(B, H * G, D, dtype=MODEL_DTYPES.get(dtype, dtype))
    k, table = empty(4096, 32, H, D, dtype=dtype), empty(B, N, dtype=I32)
    arguments = (q, empty(B, H * G), k, table, *[row] * 7, empty(B, W, H, 32), 0.1, 0.1)
    yield hgca.decay_mass, "", arguments


def rotated_parts(model: str, *lead: int) -> list[torch.Tensor]:
    """Planes and stats of pages [*lead, H]."""
    H, _, D, *_ = MODELS[model]
    shapes = planes_shape(D), (D + STATS_BYTES,)
    return [empty(*lead, H, *x, dtype=torch.uint8) for x in shapes]


def pages_of_all_layers(model: str) -> Iterator[Case]:
    H, _, D, dtype, *_ = MODELS[model]
    L, P, own = 3, 4096, MODEL_DTYPES.get(dtype, dtype)
    k = empty(P, 32, H, D, dtype=dtype)
    layers, ids = LayerPages.of([k] * L, [k] * L, "meta"), empty(64, dtype=I64)
    bounds, parts = [empty(L, P, H, D, dtype=own)] * 2, rotated_parts(model, L, P)
    of_slots = {" of slots": empty(L, 64, dtype=I64)} if model == "Qwen3-14B" else {}
    for of, rows in {"": None, **of_slots}.items():
        yield pages.build_layer_digests, of, (layers, ids, *bounds, rows)
        yield rotated.build_layer_rotated, of, (layers, ids, *parts, rows)
    slots = [k.new_empty(L, 9, *k.shape[1:])] * 2
    yield pages.copy_layer_pages, "", (layers, empty(3, 64, dtype=I64), *slots)
    for heads in (H, 1):
        slots, listed = [k.new_empty(64 * H, 32, heads, D)] * 2, empty(H, 64, dtype=I32)
        yield pages.stage_pages, f", {heads} heads", (layers, 0, listed, *slots)


def parts_of_a_step() -> Iterator[Case]:
    out, lse, row = empty(16, 40, 128), empty(16, 40), empty(4, dtype=I32)
    x = empty(16, 5120, dtype=BF16)
    table, at = empty(40960, 128), empty(16, dtype=I64)
    norm, head_norm = empty(5120, dtype=BF16), empty(128, dtype=BF16)
    yield predict.add_norm, "", (x, x, norm, 1e-6)
    yield predict.add_norm, " of layer 0", (x, None, norm, 1e-6)
    yield predict.rotate_heads, "", (x, head_norm, 1e-6, table, at, 128, True, 40, 128)
    arguments = (x[:1, :128], None, 0.0, None, at[:1], 128, True, 1, 128)
    yield predict.rotate_heads, ", one head", arguments
    yield attend.merge_states, "", (out, lse, out, lse)
    yield write_stamp, "", (empty(64, dtype=I64), 3)
    for N, chosen in ((4096, 64), (1250, 64), (8192, 512), (128, 16)):
        of_table = empty(4, N, dtype=I32), row, empty(99, dtype=I32)
        arguments = (empty(4, N), *of_table, chosen, 1, 1)
        yield kernels.select.select_pages, f", {N} pages, k={chosen}", arguments
    new = empty(4, 8, 128, dtype=BF16)
    for dtype in (BF16, E4M3, E5M2):
        pool = empty(4096, 32, 8, 128, dtype=dtype)
        yield pages.append_tokens, f", {dtype}", (new, new, row, (pool, pool, row))
        arguments = (new, new, row, *[(pool, pool, row)] * 2)
        yield pages.append_tokens, f" with mirror, {dtype}", arguments


def ring_of(spec: ArenaSpec, **more: object) -> GraphTransport:
    arena = SimpleNamespace(address=1 << 46, layout=layout_of(spec), spec=spec)
    return GraphTransport(arena, lambda: 1, device="meta", **more)


def ring_calls() -> Iterator[Case]:
    out, lse = empty(16, 40, 128), empty(16, 40)
    spec = ArenaSpec(40, 4096, 32, 8, 40, 128, "bfloat16", 0.1, 16, 64, q_dtype="bfloat16")
    ring = ring_of(spec, split=Split(36, 8, 4), timeout_us=1000)
    chosen_pages = empty(16, 64, dtype=I32)
    yield doorbell.post, "", (ring, 7, out, chosen_pages, empty(16, dtype=I32))
    yield doorbell.merge, "", (ring, 7, out, lse, lse, BF16)
    one = out[:1], chosen_pages[:1, :1], empty(1, dtype=I32)
    yield doorbell.post, " of one page", (ring, 1, *one)
    yield doorbell.merge, " of one row", (ring, 1, out[:1], lse[:1], None, F32)
    # As benchmark/ring/gpu_ring.py has it: all of the split is one, the wait is longer than 2^31 nanoseconds.
    one_layer = dataclasses.replace(spec, num_layers=1, q_dtype="float32")
    ring = ring_of(one_layer, split=Split(), timeout_us=10_000_000)
    yield doorbell.post, " without a split", (ring, 0, out, chosen_pages, empty(16, dtype=I32))
    yield doorbell.merge, " after a long wait", (ring, 0, out.to(BF16), lse, None, BF16)
