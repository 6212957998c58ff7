"""Instructions that a call executes, counted by stepping through it: for machines whose counters are not to be had.

A virtual machine often has no `perf stat -e instructions`. Linux on x86-64 only.
"""

from __future__ import annotations

import collections
import ctypes
import os
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

_TRACEME, _PEEKUSER, _SINGLESTEP, _CONT = 0, 3, 9, 7
_RIP_OFFSET = 16 * 8  # of `struct user`
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


class SteppingError(RuntimeError):
    """Steps cannot be counted here; the message says why."""


def absent_reason() -> str:
    """Why steps cannot be counted, "" if they can."""
    if platform.machine() != "x86_64":
        return f"counting steps is written for x86_64, this is {platform.machine()}"
    return "" if shutil.which("objdump") else "objdump (binutils) is not there"


def count(call: Callable[[], object], library: Path) -> collections.Counter[int]:
    """Runs ``call`` in a child, step by step.

    Returns:
        How often each instruction of ``library`` was executed, by its address in the file.

    Raises:
        SteppingError: the system does not allow it, or ``call`` failed.
    """
    child = os.fork()
    if child == 0:
        try:
            if _libc.ptrace(_TRACEME, 0, None, None) == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
                call()
                os.kill(os.getpid(), signal.SIGSTOP)
                os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if not os.WIFSTOPPED(status):
        raise SteppingError("ptrace is not allowed here")
    base, end = _span(child, library)
    seen: collections.Counter[int] = collections.Counter()
    while True:
        _libc.ptrace(_SINGLESTEP, child, None, None)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            raise SteppingError("the call failed while it was stepped through")
        if os.WSTOPSIG(status) == signal.SIGSTOP:
            break
        at = _libc.ptrace(_PEEKUSER, child, _RIP_OFFSET, None)
        if base <= at < end:
            seen[at - base] += 1
    _libc.ptrace(_CONT, child, None, None)
    os.waitpid(child, 0)
    return seen


def _span(pid: int, library: Path) -> tuple[int, int]:
    """Where a library lies in a process."""
    ends = [
        [int(x, 16) for x in line.split()[0].split("-")]
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if line.endswith(str(library))
    ]
    if not ends:
        raise SteppingError(f"{library} is not loaded")
    return min(x for x, _ in ends), max(x for _, x in ends)


def mnemonics(library: Path) -> dict[int, str]:
    """The instruction at each address of a library, by objdump."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {int(at, 16): name for at, name in re.findall(r"^ *([0-9a-f]+):\t(\S+)", text, re.M)}
