"""Triton kernels: one file per family, registered beside the references of `ops`.

Importing this package does not import triton; the first call of a kernel does. On CPU tensors the
kernels run in triton's interpreter, when TRITON_INTERPRET=1 was set before triton was imported:
for tests, and only when asked for by name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from ...core.registry import Implementation
from ..layers import LayerPages

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DIM_STEP, _MAX_DIM = 16, 256
_MAX_PAGE_TOKENS = 128
_MAX_COLUMNS, _MAX_CHOSEN = 8192, 512
_TRUE = ("1", "true", "on", "yes", "y")


@functools.cache
def _absent() -> str:
    return "" if importlib.util.find_spec("triton") else "the package triton is not installed"


def interpreted() -> bool:
    """Whether triton, if it is imported now, runs its kernels in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in _TRUE


def available() -> bool:
    """Whether kernels can run here: on a CUDA device or in the interpreter."""
    return not _absent() and (interpreted() or torch.cuda.is_available())


def _reasons(
    kv: torch.Tensor | None = None, *, pinned: tuple[str, ...] = (), **tensors: torch.Tensor | None
) -> list[str]:
    """Why the kernels cannot run; ``kv`` [..., D] stands for the tensors of the pool's dtype.

    Tensors named in ``pinned`` may lie in page-locked host memory, which the device can read.
    """
    if _absent():
        return [_absent()]
    reasons = []
    named = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    devices = {
        str(tensor.device)
        for name, tensor in named.items()
        if not (name in pinned and tensor.device.type == "cpu" and tensor.is_pinned())
    }
    if len(devices) > 1:
        reasons.append(f"tensors are on {' and '.join(sorted(devices))}; triton takes one device")
    elif devices == {"cpu"} and not interpreted():
        reasons.append("tensors are on cpu and TRITON_INTERPRET is not set")
    elif any(not name.startswith(("cpu", "cuda")) for name in devices):
        reasons.append(f"tensors are on {devices.pop()}; triton supports cuda")
    if kv is not None and kv.dtype not in _DTYPES:
        reasons.append(f"dtype {kv.dtype}; triton supports float32, bfloat16, float16")
    if kv is not None and (kv.shape[-1] % _DIM_STEP or not 0 < kv.shape[-1] <= _MAX_DIM):
        reasons.append(
            f"D={kv.shape[-1]}; triton supports multiples of {_DIM_STEP} up to {_MAX_DIM}"
        )
    for name, tensor in named.items():
        if not tensor.is_contiguous():
            reasons.append(f"{name} is not contiguous, strides {tensor.stride()}")
    return reasons


def _not_unasked(*args: Any, **_kwargs: Any) -> list[str]:
    """Why "auto" leaves the kernels out although they could run."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    # One of them may be page-locked host memory.
    if tensors and all(x.device.type == "cpu" for x in tensors):
        return ["on cpu the kernels are interpreted, only when asked for by name"]
    if interpreted():
        return ["TRITON_INTERPRET is set: the kernels would be interpreted on the host"]
    return []


def _kernel(module: str, op: str, reasons: Callable[..., list[str]]) -> Implementation:
    """Function ``op`` of ``module``, whose import is that of triton."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(f".{module}", __name__), op)(*args, **kwargs)

    return Implementation("triton", run, reasons, _not_unasked)


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


SCORE_PAGES = _kernel("score", "score_pages", _score_reasons)


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
    reasons = _reasons(
        k,
        q=q,
        k=k,
        v=v,
        pages=pages,
        last_page=last_page,
        last_len=last_len,
        slot_of=slot_of,
        n_pages=n_pages,
        **{"out[0]": written, "out[1]": lse},
    )
    if k.shape[1] > _MAX_PAGE_TOKENS:
        reasons.append(f"S={k.shape[1]}; triton supports up to {_MAX_PAGE_TOKENS}")
    return reasons


ATTEND_PAGES = _kernel("attend", "attend_pages", _attend_reasons)


def _select_reasons(
    scores: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    slot_of: torch.Tensor,
    k: int,
    sink_pages: int = 1,
    recent_pages: int = 1,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> list[str]:
    pages, missing = out if out is not None else (None, None)
    written = {"out[0]": pages, "out[1]": missing}
    reasons = _reasons(scores=scores, table=table, n_full=n_full, slot_of=slot_of, **written)
    if table.shape[1] > _MAX_COLUMNS:
        reasons.append(f"N={table.shape[1]}; triton supports up to {_MAX_COLUMNS}")
    if k > _MAX_CHOSEN:
        reasons.append(f"k={k}; triton supports up to {_MAX_CHOSEN}")
    return reasons


SELECT_PAGES = _kernel("select", "select_pages", _select_reasons)


def _layer_reasons(
    source: LayerPages, kv: torch.Tensor | None = None, **tensors: torch.Tensor | None
) -> list[str]:
    # One layer stands for all: they come from one arena, which may be page-locked memory of the host.
    pages = {"source.k": source.k[0], "source.addresses": source.addresses}
    return _reasons(kv, pinned=("source.k",), **pages, **tensors)


def _digest_reasons(
    source: LayerPages,
    ids: torch.Tensor,
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> list[str]:
    k = source.k[0]
    reasons = _layer_reasons(source, k, ids=ids, kmin=kmin, kmax=kmax, rows=rows)
    # The kernel holds all of a page's K of one head at a time.
    if k.shape[1] > _MAX_PAGE_TOKENS:
        reasons.append(f"S={k.shape[1]}; triton supports up to {_MAX_PAGE_TOKENS}")
    return reasons


def _sign_reasons(
    source: LayerPages,
    ids: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> list[str]:
    return _layer_reasons(source, source.k[0], ids=ids, low=low, high=high, rows=rows)


def _copy_reasons(
    source: LayerPages, ids: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor
) -> list[str]:
    reasons = _layer_reasons(source, ids=ids, dst_k=dst_k, dst_v=dst_v)
    if not reasons and source.shares_memory_with(dst_k, dst_v):
        reasons.append("source and targets share memory; triton copies all pages at once")
    return reasons


BUILD_LAYER_DIGESTS = _kernel("pages", "build_layer_digests", _digest_reasons)
BUILD_LAYER_SIGNS = _kernel("signs", "build_layer_signs", _sign_reasons)
COPY_LAYER_PAGES = _kernel("pages", "copy_layer_pages", _copy_reasons)


def _merge_reasons(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> list[str]:
    # The other part may be the worker's answer in page-locked memory.
    pinned = ("out_b", "lse_b")
    return _reasons(pinned=pinned, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)


MERGE_STATES = _kernel("merge", "merge_states", _merge_reasons)


def _append_reasons(
    k: torch.Tensor,
    v: torch.Tensor,
    lens: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mirror: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> list[str]:
    tensors = {"lens": lens, "pool.k": pool[0], "pool.v": pool[1], "pool.ids": pool[2]}
    if mirror is not None:
        tensors |= {"mirror.k": mirror[0], "mirror.v": mirror[1], "mirror.ids": mirror[2]}
    # A row of k and v is contiguous, the rows need not be.
    rows = {"k": k[0], "v": v[0]} if len(k) else {}
    return _reasons(k, pinned=("mirror.k", "mirror.v"), **tensors, **rows)


APPEND_TOKENS = _kernel("pages", "append_tokens", _append_reasons)


def _predict_reasons(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    w_q: torch.Tensor,
    b_q: torch.Tensor | None,
    q_norm_weight: torch.Tensor | None,
    q_norm_eps: float,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    rotary_dim: int,
    is_neox: bool,
    HQ: int,
    D: int,
) -> list[str]:
    reasons = _reasons(
        x=x, norm_weight=norm_weight, w_q=w_q, b_q=b_q, q_norm_weight=q_norm_weight,
        cos_sin=cos_sin, positions=positions,
    )  # fmt: skip
    if x.dtype not in _DTYPES:
        reasons.append(f"dtype {x.dtype}; triton supports float32, bfloat16, float16")
    return reasons


PREDICT_QUERY = _kernel("predict", "predict_query", _predict_reasons)


def _score_signs_reasons(
    q: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    out: torch.Tensor | None = None,
) -> list[str]:
    return _reasons(low, q=q, low=low, high=high, table=table, n_full=n_full, out=out)


SCORE_SIGNS = _kernel("signs", "score_signs", _score_signs_reasons)
