"""Whether a benchmark of kernels can run here, and where."""

from __future__ import annotations

import torch

from sglang_scout.ops import triton


def device() -> str:
    """Where kernels run: "cpu" in Triton's interpreter, "cuda" otherwise."""
    return "cpu" if triton.interpreted() else "cuda"


def refusal(*, check_only: bool, needs_worker: bool = False) -> str:
    """Why it cannot run here, "" if it can. In the interpreter there are checks alone, no times."""
    if needs_worker:
        try:
            from sglang_scout import _native  # noqa: F401
        except ImportError as error:
            return f"the native module is absent ({error}): no worker could answer"
    if device() == "cuda" and not torch.cuda.is_available():
        return "no CUDA device: nothing can be measured here"
    if device() == "cpu" and not check_only:
        return "TRITON_INTERPRET is set: unset it to measure"
    return ""
