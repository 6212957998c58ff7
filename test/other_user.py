"""What a process of another user tries on one of ours."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from control_channel import descriptors, duplicate

NOBODY = 65534
_PTRACE_SEIZE = 0x4206
_libc = ctypes.CDLL(None, use_errno=True)

Attempts = dict[str, Callable[[], object]]


def as_user(uid: int, work: Callable[[], dict[str, str]]) -> dict[str, str]:
    """What ``work()`` returns in a child of this user, which has nothing of this process's."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as answer:
        found = json.load(answer)
    os.waitpid(child, 0)
    return found


def outcomes(attempts: Attempts) -> dict[str, str]:
    """By name, "done" or the error's."""
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "done"
        except OSError as error:
            found[name] = type(error).__name__
    return found


def reads(pid: int) -> Attempts:
    """Ways into a process and its memory; none of them changes it. Call it as its user."""
    core, cpus = resource.prlimit(pid, resource.RLIMIT_CORE), os.sched_getaffinity(pid)
    attempts: Attempts = {
        "list descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
        "take a descriptor": lambda: duplicate(pid, 0),
        "read memory": lambda: open(f"/proc/{pid}/mem", "rb"),
        "write memory": lambda: open(f"/proc/{pid}/mem", "r+b"),
        "see addresses": lambda: open(f"/proc/{pid}/maps").read(1),
        "see the environment": lambda: open(f"/proc/{pid}/environ").read(1),
        "trace": lambda: _seize(pid),
        "have core dumps written": lambda: resource.prlimit(pid, resource.RLIMIT_CORE, core),
        "keep it from CPUs": lambda: os.sched_setaffinity(pid, cpus),
    }
    for fd, mapping in arena_of(pid):
        attempts[f"open the memory file {fd}"] = lambda fd=fd: open(f"/proc/{pid}/fd/{fd}", "rb")
        attempts[f"open its mapping {mapping}"] = lambda m=mapping: open(
            f"/proc/{pid}/map_files/{m}", "rb"
        )
    return attempts


def ends(pid: int) -> Attempts:
    return {
        "stop": lambda: os.kill(pid, signal.SIGSTOP),
        "end": lambda: os.kill(pid, signal.SIGTERM),
    }


def connects(paths: list[str]) -> Attempts:
    """To sockets that have a name in a file system."""

    def connect(path: str) -> None:
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(path)

    return {path: lambda path=path: connect(path) for path in paths}


def arena_of(pid: int) -> list[tuple[int, str]]:
    """Descriptors and mappings of the arena in a process, in pairs."""
    fds = descriptors(pid, "/memfd:sglang-scout")
    rows = [row.split() for row in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    mappings = [row[0] for row in rows if "memfd:sglang-scout" in row[-2]]
    return list(zip(fds, mappings, strict=False))


def sockets_of(pid: int) -> list[tuple[str, bool]]:
    """Unix sockets of a process: their names, empty if they have none, and whether they listen."""
    links = (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in descriptors(pid, "socket:["))
    inodes = {link[8:-1] for link in links}
    # Num RefCount Protocol Flags Type St Inode Path
    rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [("".join(r[7:]), bool(int(r[3], 16) & 0x10000)) for r in rows if r[6] in inodes]


def _seize(pid: int) -> None:
    if _libc.ptrace(_PTRACE_SEIZE, pid, None, None) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
