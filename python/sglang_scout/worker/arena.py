"""The arena: one sealed memory file with the host KV pages, the request ring and the replies.

A memfd has no name in any file system: it disappears with the last process that has it open or mapped. It is sealed, so
no holder can make another fault by truncating it. The worker inherits its descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_scout import _native
from sglang_scout.core import numa
from sglang_scout.core.errors import ArenaError
from sglang_scout.worker import host_memory
from sglang_scout.worker.host_memory import HUGE_PAGE_BYTES, populate_together
from sglang_scout.worker.ring import (
    BELL_DTYPE,
    HEADER_DTYPE,
    ArenaSpec,
    header_of,
    layout_of,
    node_spans,
    read_header,
)

logger = logging.getLogger(__name__)

MEMFD_NAME = "sglang-scout"
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MFD_NOEXEC_SEAL = 8  # of Linux 6.3
CHECKSUM_THREADS = 8  # memory-bound, more gain little

Pages = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class Arena(contextlib.AbstractContextManager["Arena"]):
    """A mapped arena of ``nbytes`` at ``address``. Constructed by :meth:`create` or :meth:`attach`.

    Attributes:
        fd: the memory file; owned by this object.
        layout: where its parts are.
        backing: ``"hugetlb"``, ``"thp"`` (transparent huge pages allowed) or ``"4k"``.
    """

    def __init__(self, fd: int, memory: np.ndarray, spec: ArenaSpec, backing: str) -> None:
        self.fd, self.spec, self.backing = fd, spec, backing
        self.nbytes, self.address = memory.nbytes, memory.ctypes.data
        self.layout = layout_of(spec)
        self._memory: np.ndarray | None = memory
        _open_arenas.add(self)

    @staticmethod
    def create(spec: ArenaSpec, *, numa_nodes: Sequence[int] = ()) -> Arena:
        """Creates, seals and maps a new arena: in the hugetlb pool if that has enough free pages, on each of
        ``numa_nodes`` too, and otherwise in transparent huge pages. Memory is allocated on first write, except from the
        pool, and where the machine must grow first to have it all. The pages of the spec's node i are bound to the i-th
        of ``numa_nodes``, if the machine has several.

        Raises ArenaError: not enough memory on a node or as the machine grows, a pool that is short though half of the
        pages are free, or a failed system call.
        """
        if numa_nodes and len(numa.nodes()) <= 1:
            numa_nodes = ()  # there is one
        arena, short = None, host_memory.pool_lacks(spec, numa_nodes)
        if not short:
            try:
                arena = _make(spec, numa_nodes, True)
            except OSError as e:
                short = f"it has enough pages, but: {e.strerror}"
        if arena is None:
            if host_memory.free_pool_bytes():
                logger.info("not in huge pages of the pool: %s", short)
            try:
                arena = _make(spec, numa_nodes, False)
            except OSError as e:
                fix = "free memory, or lower --kv-offload-host-gb"
                raise ArenaError(f"cannot allocate {spec.describe()}: {e.strerror}; {fix}") from e
        logger.info("%s, in %s pages", spec.describe(), arena.backing)
        return arena

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Maps an arena for the worker: only the part of the ring that the worker answers in is writable. ``fd`` stays
        owned by the caller. Raises ArenaError if the file is not an arena of this version, or cannot be mapped."""
        nbytes, own = os.fstat(fd).st_size, os.dup(fd)
        with contextlib.ExitStack() as on_error:
            on_error.callback(os.close, own)
            try:
                memory, backing = _map(own, nbytes, "4k")
                spec = read_header(memory)
                at = layout_of(spec)
                for begin, end in ((0, at.bell_offset), (at.kv_offset, nbytes)):
                    host_memory.protect(memory.ctypes.data + begin, end - begin)
            except OSError as e:
                raise ArenaError(f"cannot map {nbytes} bytes: {e.strerror}") from e
            on_error.pop_all()
        memory.flags.writeable = False
        return cls(own, memory, spec, backing)

    def k_pages(self, layer: int) -> np.ndarray:
        """K of a layer, [P, S, H, D], float32 or the bits of a narrower type. As all views, no copy."""
        return self._plane(layer, 0)

    def v_pages(self, layer: int) -> np.ndarray:
        """V of a layer, like :meth:`k_pages`."""
        return self._plane(layer, 1)

    def context(self, layer: int, which: int) -> np.ndarray:
        """K (0) or V (1) of a layer's context pages, [C, S, D], like :meth:`k_pages`."""
        s = self.spec
        begin = s.num_pages * s.page_bytes
        return self._plane(layer, which, begin, (s.context_pages, s.page_size, s.head_dim))

    def checksums(self) -> np.ndarray:
        """Checksums of the pages, uint64 [L, P]."""
        s, at = self.spec, self.layout
        words = self.bytes_at(at.checksums_offset, 8 * s.num_layers * s.num_pages * s.checksums)
        return words.view(np.uint64).reshape(s.num_layers, -1)

    def restore_header(self) -> None:
        """It is read first on attach, and any holder of the file could have changed it."""
        header = self.bytes_at(0, HEADER_DTYPE.itemsize).view(HEADER_DTYPE)
        header[:] = header_of(self.spec)

    def close(self) -> None:
        """Closes the file and lets go of the mapping, which lasts as long as an array that views it; idempotent."""
        if self._memory is not None:
            self._memory = None
            os.close(self.fd)
            self.fd = -1

    def __exit__(self, *exc: object) -> None:
        self.close()

    def bytes_at(self, begin: int, count: int) -> np.ndarray:
        """A part of the mapping, uint8 [count]; no copy."""
        return self._mapped()[begin : begin + count]

    def _mapped(self) -> np.ndarray:
        if self._memory is None:
            raise ArenaError("the host pages are closed")
        return self._memory

    def _plane(
        self, layer: int, which: int, begin: int = 0, shape: tuple[int, ...] = ()
    ) -> np.ndarray:
        s, at = self.spec, self.layout
        shape = shape or (s.num_pages, s.page_size, s.num_kv_heads, s.head_dim)
        begin += at.kv_offset + layer * at.layer_stride + which * at.v_offset
        plane = self.bytes_at(begin, int(np.prod(shape)) * s.storage_dtype.itemsize)
        return plane.view(s.storage_dtype).reshape(shape)


_open_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child has no mapping, and its descriptors must not keep the memory alive. Python's mmap holds a
    duplicate, whose number must stay in use."""
    files = [os.fstat(arena.fd) for arena in _open_arenas if arena.fd >= 0]
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own is closed
            if any(os.path.samestat(os.fstat(fd), file) for file in files):
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_forget_in_child)


def _make(spec: ArenaSpec, numa_nodes: Sequence[int], from_pool: bool) -> Arena:
    """An arena in a sealed file, with its header. Raises OSError.

    A mapping only reserves pages of the machine-wide pool. Whether they are on its nodes, and within cgroup limits,
    shows when they are populated; on a later access it would be a SIGBUS.
    """
    layout, flags = layout_of(spec), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB if from_pool else 0
    try:
        fd = os.memfd_create(MEMFD_NAME, flags | _MFD_NOEXEC_SEAL)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(MEMFD_NAME, flags)
    with contextlib.ExitStack() as on_error:
        on_error.callback(os.close, fd)
        os.ftruncate(fd, layout.total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory, backing = _map(fd, layout.total_bytes, "hugetlb" if from_pool else "4k")
        address, page_bytes = memory.ctypes.data, HUGE_PAGE_BYTES if from_pool else mmap.PAGESIZE
        if spans := node_spans(spec, numa_nodes, page_bytes):
            host_memory.bind_memory(address, spans)
        if not from_pool:
            host_memory.take(address, spec, numa_nodes)
        elif (error := populate_together(address, memory.nbytes)) not in (0, errno.EINVAL):
            raise OSError(error, os.strerror(error))  # EINVAL: before Linux 5.14
        arena = Arena(fd, memory, spec, backing)
        arena.restore_header()
        on_error.pop_all()
    return arena


def _map(fd: int, nbytes: int, backing: str) -> tuple[np.ndarray, str]:
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
    if backing == "4k" and host_memory.shmem_mode() in host_memory.SHMEM_MODES_THAT_HELP:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
            backing = "thp"
    # A forked child must not keep hundreds of GB alive, and a core dump must not contain user data.
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        with contextlib.suppress(OSError):
            mapping.madvise(advice)
    return np.frombuffer(mapping, dtype=np.uint8), backing


class PageChecksums:
    """Checksums of an arena's pages: computed when a page is full, verified before it is read again.

    They are stored in the arena, because the worker verifies before it attends; see sgl-kernel/src/checksums.h. This is
    the decode server's side, on an arena of a spec with ``checksums``, which must stay open.
    """

    def __init__(self, arena: Arena) -> None:
        self.words: Words = arena.checksums()  # 0 for a page that may still change
        self._at = arena.address, arena.nbytes
        self._bell = arena.bytes_at(arena.layout.bell_offset, BELL_DTYPE.itemsize).view(BELL_DTYPE)
        self._threads = min(CHECKSUM_THREADS, len(os.sched_getaffinity(0)))
        self._seen, self._damaged = self.failures, np.zeros((0, 2), np.int64)

    @property
    def failures(self) -> int:
        """Number of (layer, page) mismatches since the arena was created."""
        return int(self._bell["damaged"][0])

    def seal(self, pages: Pages) -> None:
        """``pages`` ``[n]`` are final: compute their missing checksums, in all layers."""
        _native.seal_pages(*self._at, pages, self._threads)

    def check(self, layers: Pages, pages: Pages) -> None:
        """Verify ``pages`` ``[n]`` of ``layers`` ``[n]``; :meth:`damaged` reports mismatches."""
        _native.check_pages(*self._at, layers, pages, self._threads)

    def clear(self, pages: Pages) -> None:
        """``pages`` were freed and may be overwritten."""
        self.words[:, pages] = 0

    def damaged(self) -> Pages:
        """``[n, 2]`` (layer, page) with a checksum mismatch, until the page is freed."""
        if (failures := self.failures) != self._seen:
            self._seen = failures
            self._damaged = np.argwhere(self.words & _native.PAGE_DAMAGED)
        elif len(self._damaged):
            is_damaged = self.words[tuple(self._damaged.T)] & _native.PAGE_DAMAGED
            self._damaged = self._damaged[is_damaged != 0]
        return self._damaged

    def taken(self, pages: Pages) -> Words:
        """A copy of the checksums of ``pages``, for :meth:`put`; for a damaged page, the expected one."""
        return self.words[:, pages] & ~np.uint64(_native.PAGE_DAMAGED)

    def put(self, pages: Pages, words: Words) -> None:
        """Set the checksums of ``pages``, to which the K and V of :meth:`taken` have been written."""
        self.words[:, pages] = words
