"""The C++ implementations for CPU tensors, from `sglang_scout._native`.

The native module takes addresses and sizes, so everything that makes an address valid is made sure
of here: the op's own check (sizes, dtypes) has run before, ``reasons`` covers device, layout, dtype
and head size. Page ids are compared with the pool before anything is read: in C++ where the native
function does so itself, here where it does not.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

import torch

from ..core.registry import Implementation
from .layers import LayerPages, resident_slots

_module: ModuleType | None = None
_ABSENT = ""
try:
    _module = importlib.import_module("sglang_scout._native")
except ImportError as error:  # built without it, or for another Python: say why, run the reference
    _ABSENT = f"the native module is absent ({error})"

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DIM_STEP, _MAX_DIM = 16, 16384  # head sizes that the kernels take
_REDUCTIONS = {"mass": 0, "max": 1, "sum": 2}


def available() -> bool:
    return _module is not None


def isa() -> str:
    """Instruction set that the C++ kernels run with, "" without the native module."""
    return "" if _module is None else str(_module.isa())


def set_isa(name: str) -> None:
    """Use another instruction set from the next call on, for tests and benchmarks.

    Raises:
        ValueError: unknown, or this machine lacks it. RuntimeError: no native module.
    """
    if _module is None:
        raise RuntimeError(_ABSENT)
    _module.set_isa(name)


def _reasons(
    kv: torch.Tensor | None = None,
    **tensors: torch.Tensor | None,
) -> list[str]:
    """Why the C++ code cannot run; ``kv`` [..., D] is of the pool's dtype."""
    if _module is None:
        return [_ABSENT]
    reasons = []
    if kv is not None and kv.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        reasons.append(f"dtype {kv.dtype}; native supports {known}")
    if kv is not None and (kv.shape[-1] % _DIM_STEP or not 0 < kv.shape[-1] <= _MAX_DIM):
        reasons.append(
            f"D={kv.shape[-1]}; native supports multiples of {_DIM_STEP} up to {_MAX_DIM}"
        )
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device.type != "cpu":
            reasons.append(f"{name} is on {tensor.device}; native reads CPU tensors")
        if not tensor.is_contiguous():
            reasons.append(f"{name} is not contiguous, strides {tensor.stride()}")
    return reasons


def _check_ids(op: str, name: str, ids: torch.Tensor, high: int, low: int | None = None) -> None:
    """Raise unless all of ``ids`` are below ``high``, and not below ``low`` where there is one."""
    if ids.numel() == 0:
        return
    smallest, largest = (int(x) for x in torch.aminmax(ids))
    if largest >= high or (low is not None and smallest < low):
        wrong = largest if largest >= high else smallest
        expected = f"values below {high}" if low is None else f"values in [{low}, {high})"
        raise ValueError(f"{op}: {name} has {wrong}, expected {expected}")


@contextlib.contextmanager
def naming_pages(op: str, table: torch.Tensor, n_full: torch.Tensor, P: int) -> Iterator[None]:
    """Where the module refuses a table of page ids, say which value is wrong."""
    try:
        yield
    except ValueError:
        _check_ids(op, "n_full", n_full, table.shape[1] + 1, 0)
        _check_ids(op, "table", table, P)
        raise


def _attend_reasons(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    last_page: torch.Tensor | None,
    last_len: torch.Tensor | None,
    scale: float,
    logit_cap: float = 0.0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    slot_of: torch.Tensor | None = None,
    n_pages: torch.Tensor | None = None,
) -> list[str]:
    written, lse = out if out is not None else (None, None)
    return _reasons(
        k,
        q=q,
        k=k,
        v=v,
        pages=pages,
        last_page=last_page,
        last_len=last_len,
        slot_of=slot_of,
        **{"out[0]": written, "out[1]": lse},
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    last_page: torch.Tensor | None,
    last_len: torch.Tensor | None,
    scale: float,
    logit_cap: float = 0.0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    slot_of: torch.Tensor | None = None,
    n_pages: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert _module is not None
    P, S, H, D = k.shape
    pages = resident_slots(slot_of, pages)
    if out is None:
        out = (q.new_empty(q.shape), q.new_empty(q.shape[:2]))
    try:
        _module.attend_batch(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            P,
            S,
            H,
            D,
            _DTYPES[k.dtype],
            q.shape[1] // H,
            float(scale),
            float(logit_cap),
            pages.data_ptr(),
            *pages.shape,
            0 if last_page is None else last_page.data_ptr(),
            0 if last_len is None else last_len.data_ptr(),
            out[0].data_ptr(),
            out[1].data_ptr(),
            torch.get_num_threads(),
        )
    except ValueError:  # the module found a value out of range: say which
        _check_ids("attend_pages", "pages", pages, P)
        if last_page is not None and last_len is not None:
            _check_ids("attend_pages", "last_page", last_page, P)
            _check_ids("attend_pages", "last_len", last_len[last_page >= 0], S + 1, 1)
        raise
    return out


def _score_reasons(
    q: torch.Tensor,
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> list[str]:
    return _reasons(kmin, q=q, kmin=kmin, kmax=kmax, table=table, n_full=n_full, out=out)


def _score(
    q: torch.Tensor,
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    assert _module is not None
    (P, H, D), (B, N) = kmin.shape, table.shape
    if out is None:
        out = q.new_empty((B, N))
    with naming_pages("score_pages", table, n_full, P):
        _module.score_pages(
            q.data_ptr(),
            kmin.data_ptr(),
            kmax.data_ptr(),
            _DTYPES[kmin.dtype],
            P,
            H,
            q.shape[1] // H,
            D,
            table.data_ptr(),
            n_full.data_ptr(),
            B,
            N,
            float(scale),
            _REDUCTIONS[reduce],
            out.data_ptr(),
            torch.get_num_threads(),
        )
    return out


def source_reasons(
    source: LayerPages, rows: torch.Tensor | None, **tensors: torch.Tensor
) -> list[str]:
    """Why pages cannot be read, of ops that take ``rows``."""
    k = source.k[0]
    reasons = _reasons(k, **{"source.k": k}, **tensors)
    if rows is not None:
        # They are for a device whose cache is nearer than the host's pages.
        reasons.append("rows are given; native reads a page in the row of its id")
    return reasons


def _digest_reasons(
    source: LayerPages,
    ids: torch.Tensor,
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> list[str]:
    return source_reasons(source, rows, ids=ids, kmin=kmin, kmax=kmax)


def _digest(
    source: LayerPages,
    ids: torch.Tensor,
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    assert _module is not None
    P, S, H, D = source.k[0].shape
    _check_ids("build_layer_digests", "ids", ids, P, 0)
    for k, low, high in zip(source.k, kmin, kmax, strict=True):
        _module.digest_pages(
            k.data_ptr(),
            S,
            H,
            D,
            _DTYPES[k.dtype],
            ids.data_ptr(),
            ids.numel(),
            low.data_ptr(),
            high.data_ptr(),
        )


def _copy_reasons(
    source: LayerPages, ids: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor
) -> list[str]:
    reasons = _reasons(**{"source.k": source.k[0]}, ids=ids, dst_k=dst_k, dst_v=dst_v)
    if not reasons and source.shares_memory_with(dst_k, dst_v):
        reasons.append("source and targets share memory; native copies page after page")
    return reasons


def _copy(source: LayerPages, ids: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor) -> None:
    assert _module is not None
    op, (layers, pages, slots) = "copy_layer_pages", ids[:, ids[1] >= 0]
    _check_ids(op, "layers", layers, len(source.k), 0)
    _check_ids(op, "pages", pages, source.k[0].shape[0], 0)
    _check_ids(op, "slots", slots, dst_k.shape[1], 0)
    page_bytes = dst_k[:1, :1].nbytes
    begin = 0
    for layer, count in zip(
        *(x.tolist() for x in layers.unique_consecutive(return_counts=True)), strict=True
    ):
        at = pages[begin:].data_ptr(), slots[begin:].data_ptr(), count
        for half, dst in ((source.k, dst_k), (source.v, dst_v)):
            _module.copy_pages(half[layer].data_ptr(), dst[layer].data_ptr(), page_bytes, *at)
        begin += count


ATTEND_PAGES = Implementation("native", _attend, _attend_reasons)
SCORE_PAGES = Implementation("native", _score, _score_reasons)
BUILD_LAYER_DIGESTS = Implementation("native", _digest, _digest_reasons)
COPY_LAYER_PAGES = Implementation("native", _copy, _copy_reasons)
