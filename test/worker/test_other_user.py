"""Another user of the machine has no access to a decode server and its worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from control_channel import endpoint, speaks, stranger, variable
from other_user import NOBODY, arena_of, as_user, ends, outcomes, reads, sockets_of
from sglang_scout.worker import messages as m
from sglang_scout.worker.client import WorkerClient

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def served(make_arena, cpu):
    """A client, and the pids of the server, which is this process, and of the attention process."""
    arena = make_arena()
    with WorkerClient(arena, [cpu]) as client:
        yield client, (os.getpid(), client.snapshot().pid)
        assert client.ready and client.snapshot().restarts == 0


@pytest.mark.parametrize("which", [0, 1], ids=["server", "worker"])
def test_reads_no_kv_posts_no_record_and_stops_nothing(served, which):
    pid = served[1][which]
    assert arena_of(pid)
    tried = reads(pid)
    refused = as_user(NOBODY, lambda: outcomes(tried | ends(pid)))
    assert set(refused.values()) == {"PermissionError"}, refused
    own = as_user(0, lambda: outcomes(tried))
    assert set(own.values()) == {"done"}, ("the attempts themselves are sound", own)


def test_nobody_else_talks_to_the_attention_process(served, until):
    """Its socket has a name, which all can read, and nobody listens but to this user."""
    client, (server, worker) = served
    name = endpoint(worker)
    assert sorted(sockets_of(worker)) == [(name[6:], False), (name[6:], True)]
    assert not [found for found in sockets_of(server) if found[1] and "sglang-scout" in found[0]]
    assert speaks(name)[:1] == b"\xff", "the attempt itself is sound"
    said = as_user(NOBODY, lambda: {"heard": speaks(name).hex()})
    assert said == {"heard": ""}
    cmdline = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (server, worker))
    for secret in ("SGLANG_SCOUT_BOOT_TOKEN", "SGLANG_SCOUT_ENDPOINT"):
        assert variable(worker, secret).encode() not in cmdline
    token = variable(worker, "SGLANG_SCOUT_BOOT_TOKEN").encode()

    def stop_it() -> dict[str, str]:
        with stranger(worker) as one:
            one.send_multipart([token, m.encode(m.Stop())])
            return {"answered": str(one.poll(500))}

    # A third process of this user gets through to it, and is refused by its number.
    assert as_user(0, stop_it) == {"answered": "0"}
    until(lambda: client.snapshot().refused_messages == 1, "the count")
