"""Memory after a sequence's last token is not accessed: it may belong to another process, or be unmapped."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import multiprocessing

import pytest
import torch

from sglang_scout.ops import native
from sglang_scout.ops.attend import attend_pages

pytest.importorskip("sglang_scout._native")

ZONE_BYTES = 4 << 20
PROT_NONE = 0


class Zone:
    """Memory followed by a guard region: its second half is not readable."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * ZONE_BYTES)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._end = base + ZONE_BYTES
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = ctypes.c_void_p(self._end), ctypes.c_size_t(ZONE_BYTES), PROT_NONE
        assert libc.mprotect(*arguments) == 0, ctypes.get_errno()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, readable: int) -> torch.Tensor:
        """Random data, of which ``readable`` elements lie before the guard region."""
        count, size = math.prod(shape), dtype.itemsize
        buffer = (ctypes.c_char * (count * size)).from_address(self._end - readable * size)
        found = torch.frombuffer(buffer, dtype=dtype)
        found[:readable].copy_(torch.randn(readable))
        return found.view(shape)


def attend_everywhere() -> None:
    """All instruction sets, storage types and tails; an out-of-bounds read crashes the process."""
    zones = Zone(), Zone()
    isas = []
    for name in ("portable", "avx2", "avx512", "avx512bf16"):
        with contextlib.suppress(ValueError):  # unsupported on this machine
            native.module.set_isa(name)
            isas.append(name)
    pages, last_page = torch.tensor([[0]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    for H, G, D, S in (
        (2, 4, 64, 16),
        (1, 1, 128, 32),
        (2, 5, 96, 16),
        (1, 9, 32, 64),
        (8, 2, 128, 16),
    ):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for tail in (1, 2, 3, 4, 5, 7, 8, 9, S - 1, S):
                readable = (S + tail) * H * D
                k, v = (zone.tensor((2, S, H, D), dtype, readable) for zone in zones)
                q = torch.randn(1, H * G, D).bfloat16().float()
                last_len = torch.tensor([tail], dtype=torch.int32)
                for isa in isas:
                    native.module.set_isa(isa)
                    out, _ = attend_pages(q, k, v, pages, last_page, last_len, 0.1, impl="native")
                    assert out.isfinite().all(), (isa, dtype, H, G, D, S, tail)


def test_nothing_behind_the_last_token_is_read():
    child = multiprocessing.get_context("fork").Process(target=attend_everywhere, daemon=True)
    child.start()
    child.join(120)
    assert child.exitcode == 0
