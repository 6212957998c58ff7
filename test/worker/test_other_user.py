"""Another user of the machine has no access to a decode server and its worker."""

import ctypes
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from control_channel import endpoint, speaks, stranger, variable
from other_user import NOBODY, arena_of, as_user, ends, outcomes, reads, sockets_of
from sglang_scout.worker import channel as m
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.client import WorkerClient, WorkerConfig
from worker_cases import small_spec

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(scope="module")
def served():
    """The pids of the server, which is this process, and of the attention process."""
    cpu = min(os.sched_getaffinity(0))
    with Arena.create(small_spec()) as arena, WorkerClient(arena, [cpu]) as client:
        yield os.getpid(), client.snapshot().pid
        assert client.snapshot().state == "ready" and client.snapshot().restarts == 0


@pytest.mark.parametrize("which", [0, 1], ids=["server", "worker"])
def test_reads_no_kv_posts_no_record_and_stops_nothing(served, which):
    pid = served[which]
    assert arena_of(pid)
    tried = reads(pid)
    refused = as_user(NOBODY, lambda: outcomes(tried | ends(pid)))
    assert set(refused.values()) == {"PermissionError"}, refused
    own = as_user(0, lambda: outcomes(tried))
    assert set(own.values()) == {"done"}, ("the attempts themselves are sound", own)


def test_nobody_else_talks_to_the_attention_process(served):
    """Its socket has a name, which all can read, and nobody listens but to this user."""
    server, worker = served
    name = endpoint(worker)
    assert sorted(sockets_of(worker)) == [(name[6:], False), (name[6:], True)]
    assert not [found for found in sockets_of(server) if found[1] and "sglang-scout" in found[0]]
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

    # Nor a third process of this user, whatever it knows.
    assert as_user(os.getuid(), stop_it) == {"answered": "0"}
    assert as_user(os.getuid(), lambda: {"heard": speaks(name).hex()}) == {"heard": ""}


def test_a_slow_name_service_does_not_hold_it_up(cpu):
    """libzmq asks for the names of users that it refuses."""

    def serve() -> dict[str, object]:
        if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
            return {"skip": "needs a mount namespace"}
        mounts = "mount --make-rprivate / && mount -t tmpfs tmpfs /var/run && mkdir /var/run/nscd"
        subprocess.run(mounts, shell=True, check=True)
        mute = socket.socket(socket.AF_UNIX)
        mute.bind("/var/run/nscd/socket")
        os.chmod("/var/run/nscd/socket", 0o777)
        mute.listen(50)
        config = WorkerConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.4)
        with Arena.create(small_spec()) as arena, WorkerClient(arena, [cpu], config=config) as one:
            name = one.snapshot().endpoint
            as_user(NOBODY, lambda: {"heard": speaks(name).hex()})
            time.sleep(0.6)
            return {"restarts": one.snapshot().restarts, "state": one.snapshot().state}

    found = as_user(0, serve)
    if "skip" in found:
        pytest.skip(found["skip"])
    assert found == {"restarts": 0, "state": "ready"}
