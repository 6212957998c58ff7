"""The C++ kernels for CPU tensors, `sglang_scout._native`, their dtypes and head sizes, and a check of ids.

The module takes raw addresses. Sizes and dtypes are checked by an op's specs, device, layout and head size by
`op.Implementation`, and page ids before anything is read: by the native function, or else by `check_ids`.
"""

from __future__ import annotations

import torch

from sglang_scout import _native as module

__all__ = ["DTYPES", "HEAD_DIMS", "KV_DTYPES", "check_ids", "module"]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KV_DTYPES = DTYPES | {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}
HEAD_DIMS = {"D": range(16, 16385, 16)}


def check_ids(op: str, **ids: tuple[torch.Tensor, int]) -> None:
    """Raise ValueError unless all ids are in [0, end); both are given by name."""
    for name, (values, end) in ids.items():
        if values.numel() == 0:
            continue
        smallest, largest = (int(x) for x in torch.aminmax(values))
        if smallest < 0 or largest >= end:
            wrong = smallest if smallest < 0 else largest
            raise ValueError(f"{op}: {name} has {wrong}, expected values in [0, {end})")
