"""Waiting until a worker has mapped its arena."""

import mmap
import os
import threading

import pytest

from benchmark import mapped

NBYTES = 64 << 20


@pytest.fixture
def shared():
    fd = os.memfd_create("test-mapped")
    os.ftruncate(fd, NBYTES)
    with mmap.mmap(fd, NBYTES) as memory:
        yield memory
    os.close(fd)


def test_shared_memory_counts_once_it_was_written(shared):
    before = mapped.mapped_bytes(os.getpid())
    shared.write(bytes(NBYTES // 2))
    assert NBYTES * 0.4 < mapped.mapped_bytes(os.getpid()) - before < NBYTES * 0.6


def test_it_waits_until_all_is_mapped(shared):
    before = mapped.mapped_bytes(os.getpid())
    writer = threading.Timer(0.3, lambda: shared.write(bytes(NBYTES)))
    writer.start()
    assert mapped.wait_mapped(os.getpid(), before + NBYTES, 60.0) >= 0.99
    writer.join()


def test_it_does_not_wait_for_ever(shared):
    assert mapped.wait_mapped(os.getpid(), 1 << 50, 0.2) < 0.01
    assert mapped.wait_mapped(None, 1 << 20, 0.0) == 0.0
