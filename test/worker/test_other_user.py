"""What another user of the machine can do to a decode server and its worker: nothing."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from pathlib import Path

import pytest

from sglang_scout.worker.client import WorkerClient

NOBODY = 65534
_PIDFD_GETFD = 438  # of Linux 5.6, on every architecture

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def outcome(attempt) -> str:
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"


def take_descriptor(pid: int, fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_PIDFD_GETFD, os.pidfd_open(pid), fd, 0) < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")


def attempts(pid: int, fd: int, mapping: str):
    """By name, on a process that has the arena at ``mapping`` and as ``fd``."""
    return {
        "list descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
        "open the memory file": lambda: open(f"/proc/{pid}/fd/{fd}", "rb"),
        "open its mapping": lambda: open(f"/proc/{pid}/map_files/{mapping}", "rb"),
        "take the descriptor": lambda: take_descriptor(pid, fd),
        "read memory": lambda: open(f"/proc/{pid}/mem", "rb"),
        "write memory": lambda: open(f"/proc/{pid}/mem", "r+b"),
        "see addresses": lambda: open(f"/proc/{pid}/maps").read(1),
        "stop": lambda: os.kill(pid, signal.SIGSTOP),
        "end": lambda: os.kill(pid, signal.SIGTERM),
    }


def as_another_user(work) -> dict[str, str]:
    """What ``work()`` returns in a child of user ``NOBODY``, which has nothing of this process's."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as answer:
        found = json.load(answer)
    os.waitpid(child, 0)
    return found


@pytest.fixture
def served(make_arena, cpu):
    """The server, which is this process, and its worker: pid, descriptor and mapping of the arena in each."""
    arena = make_arena()
    with WorkerClient(arena, [cpu]) as client:
        found = []
        for pid in (os.getpid(), client.snapshot().pid):
            fds = [f for f in os.listdir(f"/proc/{pid}/fd") if _is_arena(f"/proc/{pid}/fd/{f}")]
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapping = next(m.split()[0] for m in maps if "memfd:sglang-scout" in m)
            found.append((pid, int(fds[0]), mapping))
        yield found
        assert client.ready and client.snapshot().restarts == 0


def _is_arena(link: str) -> bool:
    return os.path.lexists(link) and "memfd:sglang-scout" in os.readlink(link)


@pytest.mark.parametrize("which", [0, 1], ids=["server", "worker"])
def test_reads_no_kv_posts_no_record_and_stops_nothing(served, which):
    tried = attempts(*served[which])
    refused = as_another_user(lambda: {name: outcome(tried[name]) for name in tried})
    assert set(refused.values()) == {"PermissionError"}, refused
    own = {name: outcome(tried[name]) for name in tried if name not in ("stop", "end")}
    assert set(own.values()) == {"done"}, ("the attempts themselves are sound", own)


def test_connects_to_no_socket(served):
    pid = served[1][0]
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    # Num RefCount Protocol Flags Type St Inode Path
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    own = [row for row in rows if row[6] in inodes]
    assert len(inodes) == len(own) == 1, "one socket, of the machine's own kind"
    assert len(own[0]) == 7 and not int(own[0][3], 16) & 0x10000, "no name; it does not listen"
