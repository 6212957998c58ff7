"""A ring on a small arena, with or without a CUDA device: posts and their expected answers."""

import contextlib

import numpy as np
import pytest
import torch

from sglang_scout.engine.graph_transport import GraphTransport
from sglang_scout.ops import triton
from sglang_scout.ops.attend import attend_pages_reference, merge_states_reference
from sglang_scout.worker.arena import Arena, ArenaSpec

LAYERS, BATCH, K, HQ, D = 3, 4, 5, 4, 16
DEVICE = "cpu" if triton.interpreted() else "cuda"
MAPPED = 2  # cudaHostRegisterMapped

KINDS = pytest.mark.parametrize(
    "arena",
    [(1, 1), (2, 1), (1, 2), (1, 1, "bfloat16")],
    indirect=True,
    ids=["node", "nodes", "list per head", "bfloat16 queries"],
)
NEEDS_KERNELS = pytest.mark.skipif(
    not (triton.interpreted() or torch.cuda.is_available()),
    reason="no CUDA device, TRITON_INTERPRET is not set",
)


@contextlib.contextmanager
def arena_of(nodes=1, lists=1, q_dtype="float32"):
    """An arena with random pages."""
    spec = ArenaSpec(
        LAYERS, 20, 4, 2, HQ, D, "float32", D**-0.5, BATCH * lists, K,
        num_nodes=nodes, lists=lists, q_dtype=q_dtype,
    )  # fmt: skip
    with Arena.create(spec) as made:
        rng = np.random.default_rng(3)
        for layer in range(LAYERS):
            for plane in (made.k_pages(layer), made.v_pages(layer)):
                plane[:] = rng.standard_normal(plane.shape, np.float32)
        if DEVICE == "cuda":
            assert int(torch.cuda.cudart().cudaHostRegister(made.address, made.nbytes, MAPPED)) == 0
        yield made
        if DEVICE == "cuda":
            torch.cuda.cudart().cudaHostUnregister(made.address)


def settle():
    """Waits until all launched work has finished."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def ring_of(arena, epoch=0, step=0, timeout_us=20_000_000, **more):
    how = {"timeout_us": timeout_us, "device": DEVICE} | more
    ring = GraphTransport(arena, lambda: ring.epoch, **how)
    ring.set_epoch(epoch)
    ring.begin_step(step)
    return ring


def request(seed, batch=3, k=K, lists=1):
    """A random request with queries that are exact in a record."""
    rows = batch * lists
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, HQ, D, generator=rng).bfloat16().float()
    n_pages = torch.randint(0, k + 1, (rows,), generator=rng, dtype=torch.int32)
    n_pages[0] = k
    pages = torch.randint(0, 20, (rows, k), generator=rng, dtype=torch.int32)
    pages.masked_fill_(torch.arange(k) >= n_pages[:, None], -1)
    return q.to(DEVICE), pages.to(DEVICE), n_pages.to(DEVICE)


def state(seed, rows=3):
    rng = torch.Generator().manual_seed(1000 + seed)
    parts = torch.randn(rows, HQ, D, generator=rng), torch.randn(rows, HQ, generator=rng)
    return tuple(part.to(DEVICE) for part in parts)


def shared_bytes(arena):
    """Everything that a producer writes: control, log and records, and the claims among the replies."""
    settle()
    at = arena.layout
    memory = arena._mapped()
    ends = (
        (at.control_offset, at.log_offset),
        (at.log_offset, at.bell_offset),
        (at.replies_offset, at.events_offset),
    )
    return [memory[begin:end] for begin, end in ends]


def expected_of(arena, layer, asked, out, lse):
    """The reference's merge of ``out``, ``lse`` with the requested attention, and by how much an answer in bf16 may
    change it: by half a unit in its last place, times its weight."""
    q, pages, _ = asked
    pool = (torch.from_numpy(x(layer)) for x in (arena.k_pages, arena.v_pages))
    answer = attend_pages_reference(q.cpu(), *pool, pages.cpu(), None, None, D**-0.5)
    merged, total = merge_states_reference(out.cpu(), lse.cpu(), *answer)
    unit = 2**-8 if arena.spec.q_dtype == "bfloat16" else 0.0
    return merged, unit * (answer[1] - total).exp()[..., None] * answer[0].abs()


def exchange(arena, ring, step):
    """Post every layer, merge every layer, compare with the reference. Returns the pages posted."""
    ring.begin_step(step)
    requests = [request(10 * step + i, lists=arena.spec.lists) for i in range(LAYERS)]
    for layer, (q, pages, n_pages) in enumerate(requests):
        ring.post(layer, q, pages, n_pages)
    for layer, asked in enumerate(requests):
        out, lse = state(layer)
        change = state(9)[1] if layer else None
        expected, rounding = expected_of(
            arena, layer, asked, out, lse if change is None else lse - change
        )
        dtype, atol = (torch.bfloat16, 2e-2) if layer == 2 else (torch.float32, 1e-5)
        merged = ring.merge(layer, None, asked[0].to(dtype), (out, lse), change)
        assert merged.dtype == dtype
        assert ((merged.float().cpu() - expected).abs() <= atol + rounding).all()
    assert ring.errors() == []
    return sum(int((pages >= 0).sum()) for _, pages, _ in requests)
