"""The control channel of a CPU attention process, as any process of the same user can reach it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

_PIDFD_GETFD = 438  # of Linux 5.6, on every architecture


def duplicate(pid: int, fd: int) -> int:
    """Duplicate another process's descriptor into this process. Raises OSError."""
    pidfd = os.pidfd_open(pid)
    try:
        own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
    finally:
        os.close(pidfd)
    if own < 0:
        raise OSError(ctypes.get_errno(), f"pidfd_getfd of {fd} of process {pid}")
    return own


def descriptors(pid: int, link: str) -> list[int]:
    """Descriptors of a process whose link in /proc starts with ``link``."""
    found = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(entry.path).startswith(link):
                found.append(int(entry.name))
    return found


def variable(pid: int, name: str) -> str:
    """What a process was started with."""
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(word.partition("=")[::2] for word in words)[name]


def endpoint(pid: int) -> str:
    return variable(pid, "SGLANG_SCOUT_ENDPOINT")


@contextlib.contextmanager
def stranger(pid: int) -> Iterator[zmq.Socket[bytes]]:
    """A ZMQ connection of this process's own to a process."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as one:
        one.linger = 1000
        one.connect(endpoint(pid))
        yield one


def speaks(name: str) -> bytes:
    """What whoever listens at an abstract endpoint says first; empty if it hangs up."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(5)
        one.connect("\0" + name.removeprefix("ipc://")[1:])
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            one.sendall(b"\xff" + bytes(8) + b"\x7f")  # the beginning of a greeting
            time.sleep(0.2)
            return one.recv(10)
    return b""
