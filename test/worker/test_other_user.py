"""Another user of the machine has no access to a decode server and its worker."""

from __future__ import annotations

import os

import pytest

from other_user import NOBODY, arena_of, as_user, ends, outcomes, reads, sockets_of
from sglang_scout.worker.client import WorkerClient

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def served(make_arena, cpu):
    """Pids of the server, which is this process, and of its worker."""
    arena = make_arena()
    with WorkerClient(arena, [cpu]) as client:
        yield os.getpid(), client.snapshot().pid
        assert client.ready and client.snapshot().restarts == 0


@pytest.mark.parametrize("which", [0, 1], ids=["server", "worker"])
def test_reads_no_kv_posts_no_record_and_stops_nothing(served, which):
    pid = served[which]
    assert arena_of(pid)
    tried = reads(pid)
    refused = as_user(NOBODY, lambda: outcomes(tried | ends(pid)))
    assert set(refused.values()) == {"PermissionError"}, refused
    own = as_user(0, lambda: outcomes(tried))
    assert set(own.values()) == {"done"}, ("the attempts themselves are sound", own)


def test_connects_to_no_socket(served):
    assert sockets_of(served[1]) == [("", False)], "one, without a name; it does not listen"
