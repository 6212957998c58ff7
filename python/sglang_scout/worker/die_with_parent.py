"""Exit with the parent process, however it ends.

As a program, ``die_with_parent.py PID COMMAND ...`` execs a command that is killed when process PID, its parent,
ends. Standard library only, so that it can run before anything is installed or imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process, even a stopped one, when the thread that started it ends. Raises SystemExit if
    the parent has ended already, OSError if prctl fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"PR_SET_PDEATHSIG: {os.strerror(error)}")
    if os.getppid() != parent_pid:  # it died before prctl took effect
        raise SystemExit(f"process {parent_pid}, which started this one, has ended")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
