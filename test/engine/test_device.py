"""What a step's streams wait for, and host memory that a device uses: locked in chunks, or refused with the reason."""

import errno
import mmap
import os
import resource
import weakref
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from sglang_scout.engine import device
from sglang_scout.engine.device import ForkedStream, SideStream
from sglang_scout.worker.host_memory import populate_together


def test_a_part_is_behind_what_came_before_and_before_what_joins_it(monkeypatch):
    cuda, given = mock.MagicMock(), torch.ones(1)
    monkeypatch.setattr(torch, "cuda", cuda)
    cuda.Event.side_effect = ends = [cuda.end_0, cuda.end_1]
    beside, alive = ForkedStream(torch.device("cuda")), weakref.ref(given)
    for part in (0, 1):
        with beside.fork(part, given):
            cuda.launch(part)
    del given
    beside.join(0)
    beside.join(0)  # once is enough
    assert alive() is not None, "the other part still reads it"
    beside.join()
    assert alive() is None
    done = [call[0] for call in cuda.mock_calls]
    stream = ["current_stream", "Stream().wait_stream", "stream", "stream().__enter__", "launch"]
    parts = [[*stream, "Event", f"end_{i}.record", "stream().__exit__"] for i in range(2)]
    wait = ["current_stream", "current_stream().wait_event"]
    assert done == ["Stream", *parts[0], *parts[1], *wait, *wait]
    cuda.Stream().wait_stream.assert_called_with(cuda.current_stream())
    awaited = cuda.current_stream().wait_event.call_args_list
    assert [call.args[0] for call in awaited] == ends


def test_what_a_stream_waited_for_copies_is_counted_once_it_is_known(monkeypatch):
    def event(ms, known=True):
        return SimpleNamespace(ms=ms, query=lambda: known, elapsed_time=lambda other: other.ms - ms)

    monkeypatch.setattr(torch, "cuda", mock.MagicMock())
    side = SideStream(torch.device("cuda"))
    side._waits += [(event(5.0), event(5.25)), (event(6.0), event(6.5, known=False))]
    assert [side.take_waited_ns() for _ in range(2)] == [250_000, 0]
    side._waits[0] = event(6.0), event(6.5)
    assert side.take_waited_ns() == 500_000


class FakeRuntime:
    """Locks three chunks."""

    def __init__(self):
        self.locked = {}

    def cudaHostRegister(self, address, size, flags):
        if sum(self.locked.values()) + size > 3 * CHUNK:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


CHUNK = device.LOCK_CHUNK_BYTES


@pytest.fixture
def runtime(monkeypatch):
    """Memory is populated immediately and has the same address on the device."""
    made = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(device, "populate_together", lambda address, size: 0)
    monkeypatch.setattr(device, "_device_address", lambda address: address)
    return made


@pytest.mark.usefixtures("populates")
@pytest.mark.parametrize("can_populate", [True, False])
def test_memory_is_taken_and_locked_in_chunks_with_progress_until_it_is_unlocked(
    runtime, monkeypatch, can_populate
):
    """A kernel that cannot populate it leaves that to the lock."""
    chunk = 5 * mmap.PAGESIZE
    nbytes = 2 * chunk + mmap.PAGESIZE
    fd = os.memfd_create("test")
    os.ftruncate(fd, nbytes)
    memory = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    at, register, taken, seen = memory.ctypes.data, runtime.cudaHostRegister, [], []

    def lock(*args):
        taken.append(os.fstat(fd).st_blocks * 512)
        return register(*args)

    populate = populate_together if can_populate else lambda *_: errno.EINVAL
    monkeypatch.setattr(device, "populate_together", populate)
    monkeypatch.setattr(device, "LOCK_CHUNK_BYTES", chunk)
    monkeypatch.setattr(runtime, "cudaHostRegister", lock)
    unlock = device.lock_memory(at, nbytes, seen.append)
    os.close(fd)
    assert seen == [chunk, 2 * chunk, nbytes]
    assert taken == (seen if can_populate else [0] * 3)
    assert runtime.locked == {at: chunk, at + chunk: chunk, at + 2 * chunk: mmap.PAGESIZE}
    unlock()
    assert not runtime.locked


@pytest.mark.parametrize(
    ("patches", "says"),
    [
        ({}, r"16.0 GiB of host memory: cudaErrorMemoryAllocation \(2\): out of memory after 12.0"),
        ({"lock_limit": lambda: ""}, "12.0 GiB; free memory, or lower --kv-offload-host-gb"),
        ({"lock_limit": lambda: "the limit"}, "after 12.0 GiB; the limit$"),
        (
            {"populate_together": lambda at, size: errno.ENOMEM if at > 4096 else 0},
            "allocate 16.0 GiB of host memory: Cannot allocate memory after 4.0 GiB; free",
        ),
        ({"_device_address": lambda address: address + (1 << 40)}, "other addresses"),
        ({"_device_address": lambda _: None}, "memory at 0x0, other addresses than the host's, 0x"),
    ],
)
def test_what_cannot_be_locked_is_refused_and_nothing_stays_locked(
    runtime, monkeypatch, patches, says
):
    for name, patch in patches.items():
        monkeypatch.setattr(device, name, patch)
    with pytest.raises(MemoryError, match=says):
        device.lock_memory(4096, 4 * CHUNK)
    assert not runtime.locked


def test_the_limit_on_locked_memory_is_blamed_only_where_there_is_one(monkeypatch):
    limit = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    assert device.lock_limit() == ""
    limit = 64 << 20
    assert "the limit on locked memory is 0.062 GiB: ulimit -l unlimited" in device.lock_limit()
