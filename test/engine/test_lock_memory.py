"""Host memory that a CUDA device uses: page-locked in chunks, or refused with the reason."""

import errno
import mmap
import os

import numpy as np
import pytest
import torch

from sglang_scout.engine import device


class FakeRuntime:
    """cudaHostRegister with a limit of ``limit`` bytes."""

    def __init__(self, limit):
        self.limit, self.locked = limit, {}

    def cudaHostRegister(self, address, size, flags):
        if sum(self.locked.values()) + size > self.limit:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


CHUNK = device.LOCK_CHUNK_BYTES


@pytest.fixture
def runtime(monkeypatch):
    """Locks three chunks; memory is populated immediately and has the same address on the device."""
    made = FakeRuntime(3 * CHUNK)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(device, "populate_together", lambda address, size: 0)
    monkeypatch.setattr(device, "_device_address", lambda address: address)
    return made


def test_memory_is_locked_in_chunks_with_progress_or_not_at_all(runtime):
    seen = []
    unlock = device.lock_memory(4096, 2 * CHUNK + 5, seen.append)
    assert seen == [CHUNK, 2 * CHUNK, 2 * CHUNK + 5]
    assert runtime.locked == {4096: CHUNK, 4096 + CHUNK: CHUNK, 4096 + 2 * CHUNK: 5}
    with pytest.raises(
        MemoryError, match=r"16.0 GiB of host memory: CUDA error 2 after 0.0 GiB; .*ulimit -l"
    ):
        device.lock_memory(1 << 40, 4 * CHUNK)
    assert len(runtime.locked) == 3, "nothing of it stays locked"
    unlock()
    assert not runtime.locked


@pytest.mark.usefixtures("populates")
def test_memory_is_taken_before_it_is_locked(monkeypatch):
    chunk = 5 * mmap.PAGESIZE
    nbytes = 2 * chunk + mmap.PAGESIZE
    fd = os.memfd_create("test")
    os.ftruncate(fd, nbytes)
    memory = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)

    class Runtime(FakeRuntime):
        def cudaHostRegister(self, address, size, flags):
            here = address - memory.ctypes.data + size
            assert os.fstat(fd).st_blocks * 512 >= here, "taken up to here"
            return super().cudaHostRegister(address, size, flags)

    runtime = Runtime(nbytes)
    monkeypatch.setattr(device, "LOCK_CHUNK_BYTES", chunk)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(device, "_device_address", lambda address: address)
    device.lock_memory(memory.ctypes.data, nbytes)
    assert len(runtime.locked) == 3
    os.close(fd)


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EFAULT, errno.EINVAL])
def test_memory_that_is_not_there_is_not_called_a_limit_on_locked_memory(
    runtime, monkeypatch, error
):
    taken = iter([0, error, 0])
    monkeypatch.setattr(device, "populate_together", lambda address, size: next(taken))
    if error == errno.EINVAL:  # kernel without support; the lock populates it
        device.lock_memory(4096, 3 * CHUNK)
        assert len(runtime.locked) == 3
        return
    with pytest.raises(
        MemoryError, match=rf"12.0 GiB of host memory: {os.strerror(error)} after 4.0 GiB; free"
    ):
        device.lock_memory(4096, 3 * CHUNK)
    assert not runtime.locked, "nothing of it stays locked"


@pytest.mark.parametrize("theirs", [lambda address: address + (1 << 40), lambda _: None])
def test_memory_with_another_address_on_the_device_is_not_used(runtime, monkeypatch, theirs):
    monkeypatch.setattr(device, "_device_address", theirs)
    seen = []
    with pytest.raises(MemoryError, match="other addresses"):
        device.lock_memory(4096, 2 * CHUNK, seen.append)
    assert not runtime.locked and not seen, "it is said before more is locked"
