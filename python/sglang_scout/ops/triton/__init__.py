"""Triton kernels, one file per family, and the functions that launch them, each with the name and the arguments of its
op. An empty grid launches nothing. Importing this package does not import triton.

On CPU tensors they run, if asked for by name, in Triton's interpreter: TRITON_INTERPRET=1 before triton is imported.
"""

from __future__ import annotations

import os

HEAD_DIMS = {"D": range(16, 257, 16)}
PAGES = HEAD_DIMS | {"S": range(1, 129)}
"""For kernels that hold a page of one head at a time."""


def interpreted() -> bool:
    """Whether triton, if imported now, would run kernels in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes", "y")
