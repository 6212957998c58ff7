"""Streams and transfers of a CUDA device, asynchronous: steps and the host never wait for each other.

On the CPU device, where the same code runs in tests, memory is shared and everything is synchronous.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_scout.ops import triton as kernels
from sglang_scout.worker.host_memory import gib, populate_together

LOCK_CHUNK_BYTES = 4 * 2**30
_MAPPED = 2  # cudaHostRegisterMapped


def lock_memory(
    address: int, nbytes: int, progress: Callable[[int], None] | None = None
) -> Callable[[], None]:
    """Page-lock host memory and map it for the device.

    Untouched pages are faulted in first, by several threads: the lock itself would clear them on one, which takes
    minutes for hundreds of GB.

    Args:
        progress: called with the bytes locked so far, every ``LOCK_CHUNK_BYTES``.
    Returns:
        A function that undoes it, to be called when the device no longer uses the memory.
    Raises:
        MemoryError: the system refuses; says how far it got. Nothing stays locked.
    """
    runtime = torch.cuda.cudart()
    with contextlib.ExitStack() as locked:
        for done in range(0, nbytes, LOCK_CHUNK_BYTES):
            size = min(LOCK_CHUNK_BYTES, nbytes - done)
            of_all, after = f"{nbytes / 2**30:.1f} GiB of host memory", f"{done / 2**30:.1f} GiB"
            error = populate_together(address + done, size)
            if error not in (0, errno.EINVAL):  # kernel without support
                why = f"{os.strerror(error)} after {after}; free memory"
                raise MemoryError(f"cannot allocate {of_all}: {why}, or lower --kv-offload-host-gb")
            if status := int(runtime.cudaHostRegister(address + done, size, _MAPPED)):
                raise MemoryError(
                    f"cannot page-lock {of_all}: {_cuda_error(status)} after {after}; "
                    f"{lock_limit() or 'free memory, or lower --kv-offload-host-gb'}"
                )
            locked.callback(runtime.cudaHostUnregister, address + done)
            there = _device_address(address + done)
            if there != address + done:
                what = f"{there or 0:#x}, other addresses than the host's, {address + done:#x}"
                raise MemoryError(f"the GPU maps page-locked memory at {what}; use another GPU")
            if progress is not None:
                progress(done + size)
        return locked.pop_all().close


def lock_limit() -> str:
    """What to do about the limit on locked memory, "" if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    fix = "ulimit -l unlimited, in a systemd service LimitMEMLOCK=infinity, for docker --ulimit memlock=-1"
    is_finite = limit != resource.RLIM_INFINITY
    return f"the limit on locked memory is {gib(limit)}: {fix}" if is_finite else ""


def _cuda_error(status: int) -> str:
    runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")  # torch's
    for call in (runtime.cudaGetErrorName, runtime.cudaGetErrorString):
        call.restype = ctypes.c_char_p
    name, text = runtime.cudaGetErrorName(status), runtime.cudaGetErrorString(status)
    return f"{name.decode()} ({status}): {text.decode()}"


def _device_address(address: int) -> int | None:
    """The device's address of page-locked memory, None if the driver knows none. Queried for the memory itself: where
    CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is 0, it need not differ from the host's."""
    there = ctypes.c_uint64(0)
    driver = ctypes.CDLL("libcuda.so.1")
    host = ctypes.c_void_p(address)
    failed = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(there), host, ctypes.c_uint(0))
    return None if failed else there.value


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """``values`` on ``device``, ordered on the current stream."""
    there = torch.from_numpy(values)
    if device.type == "cpu":
        return there
    return there.pin_memory().to(device, non_blocking=True)


class ForkedStream:
    """Overlaps part of a step with the rest, on a stream forked from the step's and joined with it, by events that a
    capture turns into graph edges.

    The caching allocator hands out memory per stream, in call order. So a part's inputs must live until it is joined,
    and its outputs are freed while no part is being launched: the next one starts after everything launched before.
    Without a ``device`` everything runs in order, as on the CPU device.
    """

    def __init__(self, device: torch.device | None) -> None:
        cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._parts: dict[int, tuple[torch.cuda.Event | None, Any]] = {}

    @contextlib.contextmanager
    def fork(self, key: int, *given: Tensor) -> Iterator[None]:
        """Launches within are part ``key``, ordered after all work of the current stream and of other parts.

        It may read ``given``, which is kept alive, and persistent memory; both until :meth:`join`.
        """
        end = None
        if self._stream is None:
            yield
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield
                end = torch.cuda.Event()
                end.record()
        self._parts[key] = end, given

    def join(self, *keys: int) -> None:
        """The current stream waits for these parts; without ``keys`` for all."""
        for key in keys or list(self._parts):
            end, _ = self._parts.pop(key, (None, None))
            if end is not None:
                torch.cuda.current_stream().wait_event(end)


class SideStream:
    """Runs copies concurrently with the steps' stream; replaces the CPU device's thread pool.

    Copies may overwrite what the steps launched so far still read, so they start after those.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def submit(self, function: Callable[..., Any], /, *args: Any) -> StreamCopy:
        """Launch what ``function`` launches, after all work of the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        end = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            function(*args)
            end.record()
        return StreamCopy(end, self._waits)

    def take_waited_ns(self) -> int:
        """How long steps have waited for copies, as far as the host has not been told and knows by now."""
        waited_ns = 0
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            waited_ns += int(before.elapsed_time(after) * 1e6)
        return waited_ns

    def shutdown(self, wait: bool = True) -> None:
        if wait:
            self._stream.synchronize()


class StreamCopy:
    """Completion of copies on a side stream, with a future's interface; ``waits`` gets the times before and after."""

    def __init__(self, end: torch.cuda.Event, waits: deque[Any]) -> None:
        self._end, self._waits, self._is_awaited = end, waits, False

    def exception(self, timeout: float | None = None) -> None:
        """The current stream, not the host, waits for the end: no timeout applies."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        torch.cuda.current_stream().wait_event(self._end)
        after.record()
        self._waits.append((before, after))
        self._is_awaited = True

    def done(self) -> bool:
        """Whether the current stream is ordered after the copies."""
        return self._is_awaited or self._end.query()


class Staging:
    """A block of int32 words that the host fills for each step, and its copy on the device.

    Double-buffered on the host, so that one buffer can be filled while the other is still read. ``device`` ``[words]``
    has what was last sent.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        self.device = torch.zeros(words, dtype=torch.int32, device=device)
        self._on_cuda = device.type == "cuda"
        self._host = [torch.zeros(words, dtype=torch.int32) for _ in range(2)]
        if self._on_cuda:
            self._host = [h.pin_memory() for h in self._host]
        self._words = [h.numpy() for h in self._host]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def fill(self) -> npt.NDArray[np.int32]:
        """The current host buffer, ``[words]``; holds its contents of two calls ago."""
        self._turn ^= 1
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # of two steps ago: long done
        return self._words[self._turn]

    def send(self, words: int) -> None:
        """Copy the first ``words`` to the device, in current-stream order."""
        self.device[:words].copy_(self._host[self._turn][:words], non_blocking=self._on_cuda)
        if self._on_cuda:
            self._sent[self._turn] = torch.cuda.Event()
            self._sent[self._turn].record()


class Fetching:
    """Tensors in flight from the device to the host.

    Args:
        tensors: copied in current-stream order; may be overwritten after it.
        into: page-locked host tensors of the same sizes for those of a CUDA device; None: allocated here.
    """

    def __init__(self, tensors: list[Tensor], into: list[Tensor] | None = None) -> None:
        self._end: torch.cuda.Event | None = None
        if not any(t.is_cuda for t in tensors):
            self._there = [t.clone() for t in tensors]
            return
        self._there = into or [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
        for source, target in zip(tensors, self._there, strict=True):
            target.copy_(source, non_blocking=True)
        self._end = torch.cuda.Event()
        self._end.record()

    def wait(self) -> list[npt.NDArray[Any]]:
        """Wait for the values."""
        if self._end is not None:
            self._end.synchronize()
        return [t.numpy() for t in self._there]


def write_stamp(stamps: Tensor, index: int) -> None:
    """Write the device clock in nanoseconds to ``stamps[index]``, int64, in order on the current stream.

    A captured graph writes it again in every replay. On the CPU device the clock is ``time.monotonic_ns``.
    """
    if stamps.device.type == "cpu" and not kernels.interpreted():
        stamps[index] = time.monotonic_ns()
    else:
        kernels.common.stamp_kernel[(1,)](stamps, index, num_warps=1)
