"""Triton kernels: one file per family, registered beside the references of `ops`.

Importing this package does not import triton; the first call of a kernel does. On CPU tensors the
kernels run in triton's interpreter, when TRITON_INTERPRET=1 was set before triton was imported:
for tests, and only when asked for by name.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

from ...core.registry import Implementation

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DIM_STEP, _MAX_DIM = 16, 256
_MAX_PAGE_TOKENS = 128
_MAX_COLUMNS, _MAX_CHOSEN = 8192, 512
_MAX_RANK = 128
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


def _score(*args: Any, **kwargs: Any) -> torch.Tensor:
    from .score import score_pages

    return score_pages(*args, **kwargs)


SCORE_PAGES = Implementation("triton", _score, _score_reasons, _not_unasked)


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
        **{"out[0]": written, "out[1]": lse},
    )
    if k.shape[1] > _MAX_PAGE_TOKENS:
        reasons.append(f"S={k.shape[1]}; triton supports up to {_MAX_PAGE_TOKENS}")
    return reasons


def _attend(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from .attend import attend_pages

    return attend_pages(*args, **kwargs)


ATTEND_PAGES = Implementation("triton", _attend, _attend_reasons, _not_unasked)


def _select_reasons(
    scores: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    slot_of: torch.Tensor,
    k: int,
    sink_pages: int = 1,
    recent_pages: int = 1,
) -> list[str]:
    reasons = _reasons(scores=scores, table=table, n_full=n_full, slot_of=slot_of)
    if table.shape[1] > _MAX_COLUMNS:
        reasons.append(f"N={table.shape[1]}; triton supports up to {_MAX_COLUMNS}")
    if k > _MAX_CHOSEN:
        reasons.append(f"k={k}; triton supports up to {_MAX_CHOSEN}")
    return reasons


def _select(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from .select import select_pages

    return select_pages(*args, **kwargs)


SELECT_PAGES = Implementation("triton", _select, _select_reasons, _not_unasked)


def _digest_reasons(
    k: torch.Tensor, ids: torch.Tensor, kmin: torch.Tensor, kmax: torch.Tensor
) -> list[str]:
    # The pages may be the host's, in page-locked memory.
    reasons = _reasons(k, pinned=("k",), k=k, ids=ids, kmin=kmin, kmax=kmax)
    if k.shape[1] > _MAX_PAGE_TOKENS:
        reasons.append(f"S={k.shape[1]}; triton supports up to {_MAX_PAGE_TOKENS}")
    return reasons


def _digest(*args: Any, **kwargs: Any) -> None:
    from .pages import build_digests

    build_digests(*args, **kwargs)


def _layer_digest_reasons(
    source: Any, ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> list[str]:
    reasons = _digest_reasons(source.k[0], ids, low, high)  # one layer stands for all
    if source.addresses.device != ids.device:
        reasons.append(f"source is for {source.addresses.device}, ids are on {ids.device}")
    return reasons


def _layer_digests(*args: Any, **kwargs: Any) -> None:
    from .pages import build_layer_digests

    build_layer_digests(*args, **kwargs)


def _layer_signs(*args: Any, **kwargs: Any) -> None:
    from .signs import build_layer_signs

    build_layer_signs(*args, **kwargs)


def _copy_reasons(
    src: torch.Tensor, src_ids: torch.Tensor, dst: torch.Tensor, dst_ids: torch.Tensor
) -> list[str]:
    pinned = ("src", "dst")
    reasons = _reasons(pinned=pinned, src=src, src_ids=src_ids, dst=dst, dst_ids=dst_ids)
    if not reasons and src.untyped_storage().data_ptr() == dst.untyped_storage().data_ptr():
        reasons.append("src and dst share memory; triton copies all pages at once")
    return reasons


def _copy(*args: Any, **kwargs: Any) -> None:
    from .pages import copy_pages

    copy_pages(*args, **kwargs)


def _copy_layers_reasons(
    source: Any, ids: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor
) -> list[str]:
    pages = source.k[0]  # stands for all layers: they come from one arena
    reasons = _reasons(
        pinned=("source.k",), ids=ids, addresses=source.addresses, dst_k=dst_k, dst_v=dst_v,
        **{"source.k": pages},
    )  # fmt: skip
    if not reasons and source.shares_memory_with(dst_k, dst_v):
        reasons.append("source and targets share memory; triton copies all pages at once")
    return reasons


def _copy_layers(*args: Any, **kwargs: Any) -> None:
    from .pages import copy_layer_pages

    copy_layer_pages(*args, **kwargs)


def _merge_reasons(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> list[str]:
    # The other part may be the worker's answer in page-locked memory.
    pinned = ("out_b", "lse_b")
    return _reasons(pinned=pinned, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)


def _merge(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from .merge import merge_states

    return merge_states(*args, **kwargs)


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


def _append(*args: Any, **kwargs: Any) -> None:
    from .pages import append_tokens

    append_tokens(*args, **kwargs)


BUILD_DIGESTS = Implementation("triton", _digest, _digest_reasons, _not_unasked)
BUILD_LAYER_DIGESTS = Implementation("triton", _layer_digests, _layer_digest_reasons, _not_unasked)
BUILD_LAYER_SIGNS = Implementation("triton", _layer_signs, _layer_digest_reasons, _not_unasked)
COPY_PAGES = Implementation("triton", _copy, _copy_reasons, _not_unasked)
COPY_LAYER_PAGES = Implementation("triton", _copy_layers, _copy_layers_reasons, _not_unasked)
MERGE_STATES = Implementation("triton", _merge, _merge_reasons, _not_unasked)
APPEND_TOKENS = Implementation("triton", _append, _append_reasons, _not_unasked)


def _pack_reasons(
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    ids: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    step: torch.Tensor,
) -> list[str]:
    return _reasons(kmin, kmin=kmin, kmax=kmax, ids=ids, low=low, high=high, step=step)


def _pack(*args: Any, **kwargs: Any) -> None:
    from .score_int8 import pack_digests

    pack_digests(*args, **kwargs)


def _score_int8_reasons(
    q: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    step: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> list[str]:
    tensors = {"q": q, "low": low, "high": high, "step": step, "table": table, "n_full": n_full}
    return _reasons(q, out=out, **tensors)


def _score_int8(*args: Any, **kwargs: Any) -> torch.Tensor:
    from .score_int8 import score_pages_int8

    return score_pages_int8(*args, **kwargs)


PACK_DIGESTS = Implementation("triton", _pack, _pack_reasons, _not_unasked)
SCORE_PAGES_INT8 = Implementation("triton", _score_int8, _score_int8_reasons, _not_unasked)


def _advance_reasons(
    x: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    known: torch.Tensor,
    carry: float = 0.0,
    correction: tuple[torch.Tensor, ...] | None = None,
) -> list[str]:
    learned = {f"correction[{i}]": t for i, t in enumerate(correction or ())}
    reasons = _reasons(x=x, before=before, after=after, known=known, **learned)
    if x.dtype not in _DTYPES:
        reasons.append(f"dtype {x.dtype}; triton supports float32, bfloat16, float16")
    if correction is not None and not 0 < correction[0].shape[1] <= _MAX_RANK:
        reasons.append(f"rank {correction[0].shape[1]}; triton supports 1 to {_MAX_RANK}")
    return reasons


def _advance(*args: Any, **kwargs: Any) -> torch.Tensor:
    from .advance import advance_input

    return advance_input(*args, **kwargs)


ADVANCE_INPUT = Implementation("triton", _advance, _advance_reasons, _not_unasked)


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


def _predict(*args: Any, **kwargs: Any) -> torch.Tensor:
    from .predict import predict_query

    return predict_query(*args, **kwargs)


PREDICT_QUERY = Implementation("triton", _predict, _predict_reasons, _not_unasked)


def _build_signs_reasons(
    k: torch.Tensor, ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> list[str]:
    return _reasons(k, pinned=("k",), k=k, ids=ids, low=low, high=high)


def _build_signs(*args: Any, **kwargs: Any) -> None:
    from .signs import build_signs

    build_signs(*args, **kwargs)


def _score_signs_reasons(
    q: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    out: torch.Tensor | None = None,
) -> list[str]:
    return _reasons(low, q=q, low=low, high=high, table=table, n_full=n_full, out=out)


def _score_signs(*args: Any, **kwargs: Any) -> torch.Tensor:
    from .signs import score_signs

    return score_signs(*args, **kwargs)


BUILD_SIGNS = Implementation("triton", _build_signs, _build_signs_reasons, _not_unasked)
SCORE_SIGNS = Implementation("triton", _score_signs, _score_signs_reasons, _not_unasked)
