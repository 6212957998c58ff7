"""The nanobind module of sgl-kernel (src/bind.cpp, src/bind_residency.cpp, src/bind_runtime.cpp), for type checkers.

``*_ptr`` and ``address`` are addresses of contiguous buffers. Sizes carry the package's axis names.
What makes an address valid is checked by the callers: ``ops/op.py``, ``ops/native.py`` and ``worker/client.py``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Kernels -----------------------------------------------------------------------------------------

def attend_batch(
    q_ptr: int,
    k_ptr: int,
    v_ptr: int,
    num_pages: int,
    S: int,
    H: int,
    D: int,
    dtype: int,
    G: int,
    scale: float,
    pages_ptr: int,
    B: int,
    C: int,
    R: int,
    last_page_ptr: int,
    last_len_ptr: int,
    out_ptr: int,
    lse_ptr: int,
    threads: int = 1,
) -> None: ...
def copy_pages(
    src_ptr: int, dst_ptr: int, page_bytes: int, src_ids_ptr: int, dst_ids_ptr: int, n: int
) -> None: ...
def digest_pages(
    k_ptr: int,
    S: int,
    H: int,
    D: int,
    dtype: int,
    ids_ptr: int,
    n: int,
    digest_dtype: int,
    kmin_ptr: int,
    kmax_ptr: int,
) -> None: ...
def score_pages(
    q_ptr: int,
    kmin_ptr: int,
    kmax_ptr: int,
    dtype: int,
    P: int,
    H: int,
    G: int,
    D: int,
    table_ptr: int,
    n_full_ptr: int,
    B: int,
    N: int,
    scale: float,
    reduce: int,
    out_ptr: int,
    threads: int = 1,
) -> None: ...
def rotate_pages(
    k_ptr: int,
    v_ptr: int,
    H: int,
    D: int,
    dtype: int,
    ids_ptr: int,
    n: int,
    planes_ptr: int,
    stats_ptr: int,
    turn_ptr: int = 0,
    bits_ptr: int = 0,
) -> None: ...
def score_rotated(
    q_ptr: int,
    planes_ptr: int,
    stats_ptr: int,
    P: int,
    H: int,
    G: int,
    D: int,
    table_ptr: int,
    n_full_ptr: int,
    B: int,
    N: int,
    scale: float,
    reduce: int,
    out_ptr: int,
    threads: int = 1,
    turn_ptr: int = 0,
    bits_ptr: int = 0,
) -> None: ...

RUNS_PER_THREAD: int

def split_runs(
    threads: int, most: int, least_pages: int, sequences: int, total: int, largest: int
) -> int: ...
def isa() -> str: ...
def best_isa() -> str: ...
def set_isa(name: str) -> None: ...

# Residency; see ops/residency.py -------------------------------------------------------------------

_Ids = npt.NDArray[np.int64]
_Pages = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float32]
_Flags = npt.NDArray[np.bool_]

def count_pages(pages: _Pages) -> _Ids: ...

class Residency:
    frequency: _Floats
    stamp: npt.NDArray[np.int32]
    slot_of: npt.NDArray[np.int32]
    is_pending: _Flags
    generation: _Ids
    page_of: npt.NDArray[np.int32]
    slot_frequency: _Floats
    slot_stamp: npt.NDArray[np.int32]
    free: _Ids
    num_free: _Ids
    def __init__(self, layers: int, pages: int, slots: int) -> None: ...
    def touch(self, layers: _Ids, pages: _Pages, weights: _Floats, step: int) -> None: ...
    def protect(self, pages: _Ids, step: int) -> int: ...
    def least_frequent(
        self, counts: _Ids, before_step: int, below: _Floats
    ) -> tuple[_Ids, _Ids, _Floats]: ...
    def most_frequent(
        self, layers: _Ids, pages: _Pages, counts: _Flags, is_first: _Flags, limits: _Ids
    ) -> tuple[_Ids, _Ids]: ...
    def absent(self, keys: _Ids) -> _Ids: ...
    def reserve(self, keys: _Ids) -> tuple[_Ids, _Ids, _Ids, _Ids]: ...
    def land(
        self, layers: _Ids, pages: _Ids, slots: _Ids, generations: _Ids, step: int
    ) -> _Ids: ...
    def vacate(self, layers: _Ids, slots: _Ids) -> _Ids: ...

# Ring --------------------------------------------------------------------------------------------

RING_LAYOUT_VERSION: int
RING_MAX_PARTS: int
RING_MAX_NODES: int
RING_CLOSED_ITEM: int
RING_STRUCTS: dict[str, Any]
"""numpy dtypes of Header, Control, Bell, StatLine, RecordHeader, ReplyHeader, Event of src/ring.h."""

def ring_lay_out(header_ptr: int) -> None: ...
def ring_defect(address: int, nbytes: int) -> str: ...

PAGE_SEALED: int
PAGE_DAMAGED: int

def page_checksum(k_ptr: int, v_ptr: int, page_bytes: int) -> int: ...
def seal_pages(address: int, nbytes: int, pages_ptr: int, n: int, threads: int) -> None: ...
def check_pages(
    address: int, nbytes: int, layers_ptr: int, pages_ptr: int, n: int, threads: int
) -> None: ...
def least_run_pages(page_bytes: int) -> int: ...
def partial_bytes(
    num_layers: int, max_batch: int, q_heads: int, head_dim: int, parts: int
) -> int: ...

class RingProducer:
    def __init__(self, address: int, nbytes: int) -> None: ...
    def next_epoch(self) -> int: ...
    def set_live_epoch(self, epoch: int) -> None: ...
    def live_epoch(self) -> int: ...
    def set_split(self, threads: int, most: int, least_pages: int) -> None: ...
    def post(
        self,
        layer: int,
        step: int,
        rows: int,
        q_ptr: int,
        pages_ptr: int,
        k: int,
        n_pages_ptr: int,
        parts: int,
        q_bytes: int,
    ) -> int: ...
    def wait(
        self,
        ticket: int,
        layer: int,
        step: int,
        timeout_us: int,
        spin_us: int,
        out_ptr: int,
        lse_ptr: int,
        out_bytes: int,
    ) -> tuple[int, int]:
        """Time waited in microseconds and pages that the caller computed."""
    def totals(self) -> dict[str, int]: ...
    def set_trace(self, on: bool) -> None: ...
    def next_event(self, line: int) -> int: ...
    def read_events(self, line: int, start: int, to_ptr: int) -> tuple[int, int, int]:
        """Where to go on, events copied to ``to_ptr`` (at most event_entries), events lost."""

class RingAttendant:
    def __init__(self, producer: RingProducer, poll_us: int) -> None: ...
    def stop(self) -> None: ...
    def pages(self) -> int:
        """Pages of records that were answered here."""

class RingRuntime:
    def __init__(
        self,
        address: int,
        nbytes: int,
        epoch: int,
        cpus: Sequence[int],
        spin_us: int,
        max_parts: int,
        nodes: Sequence[int] = (),
        help_after_us: int = 50,
    ) -> None: ...
    def stop(self) -> None: ...
    def progress(self) -> tuple[int, int]:
        """Records pending and items computed."""
